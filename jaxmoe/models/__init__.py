"""Model families: a config reader, tensor-name rules and a choice of parts each."""
