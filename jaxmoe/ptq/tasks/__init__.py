"""The task scheduler: tasks with reads and writes, one queue, several threads and processes.

`task` is the graph, `queue` the rules, `source` the queue as threads see it, `link`, `server` and `client` the wire,
`run` the loop. Data flows through files in a folder that all processes see; here only names travel, so a task must be
idempotent and its result durable when it returns.
"""
