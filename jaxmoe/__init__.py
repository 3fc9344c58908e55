"""Plan, quantise and serve mixture-of-experts models in INT8 on JAX meshes of CPUs, GPUs and TPUs."""

from importlib import metadata

__version__ = metadata.version("jaxmoe")
