"""The engine: requests, pages, schedule, shapes and the compiled step."""
