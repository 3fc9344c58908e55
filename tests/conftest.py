"""What holds for all tests: eight CPU devices, strict promotion, no network, reproducible examples.

Nothing of jaxmoe is imported here, so that the jaxtyping hook (see pyproject.toml) sees every module first.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import hypothesis
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jaxmoe", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("jaxmoe")
