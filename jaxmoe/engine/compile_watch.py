"""Counts XLA compilations of the process, so that 'never compiles after warm-up' is a number."""

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileWatch:
    """Counts from its creation on; `count` never decreases. One listener per watch, for the life of the process."""

    def __init__(self) -> None:
        """Registers the listener: JAX has no public way to remove one, so create few."""
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_kwargs: object) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs
