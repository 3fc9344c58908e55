"""The one table of tolerances: every inexact comparison of the tests names an entry, and every entry says why."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A bound and the reason for its size."""

    value: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "golden_logits": Tolerance(
        value=2e-5,
        reason="absolute, tiny logits of size 1 to 5; float32 sums in another order than torch's: 3e-6 measured on 1 "
        "and on 8 devices, a wrong part moves logits by more than 1e-2",
    ),
    "same_logits": Tolerance(
        value=1e-5,
        reason="absolute, tiny logits; the same float32 products by another program (chunk, device count), whose dots "
        "may sum in another order: 3e-6 measured",
    ),
    "bfloat16_logits": Tolerance(
        value=0.05,
        reason="median over tokens of the root mean square in standard deviations of the tiny logits, because a few "
        "tokens choose another expert; 8 bits in every product: 0.031 measured; the least of all parts, a key bias, "
        "moves the median by 0.066 when left out",
    ),
    "int8_logits": Tolerance(
        value=0.05,
        reason="likewise with INT8 weights in groups of 32 and INT8 activations: 0.040 and 0.028 measured",
    ),
    "leaf_matters": Tolerance(
        value=1e-3,
        reason="least change of some tiny logit when one layer of one leaf changes its sign; 100 times float noise",
    ),
    "int8_half_step": Tolerance(
        value=1e-4,
        reason="fraction of a step beyond half a step: x * (127 / amax) and amax * (1 / 127) each round to 24 bits, at "
        "most 127 steps times 3 * 2**-24 = 2.3e-5",
    ),
    "int8_linear": Tolerance(
        value=2e-6,
        reason="relative to the largest output; the integer sums are exact, and up to 18 float32 terms may be fused "
        "into multiply-adds by the compiler, half an ulp each",
    ),
    "float_linear": Tolerance(
        value=3.5e-5,
        reason="relative to |x| @ |w|; a float32 sum of up to 576 products in any order errs by at most 576 * 2**-24",
    ),
    "bfloat16_ulp": Tolerance(
        value=2**-7,
        reason="relative; a float32 result near a tie may be rounded to either bfloat16 neighbour, one ulp apart",
    ),
    "int8_experts": Tolerance(
        value=1e-2,
        reason="relative to the largest output; exp differs by ulps between numpy and XLA, and a hidden value near a "
        "tie then moves by one of 127 steps",
    ),
    "float_experts": Tolerance(
        value=1e-5,
        reason="relative to the largest output; three float32 products of up to 64 terms and an exp, in another order",
    ),
    "router_weights": Tolerance(
        value=2e-6,
        reason="relative; a softmax or sigmoid, a sum of up to 8 and a quotient in float32: about 10 roundings of "
        "2**-24",
    ),
    "sample_mass": Tolerance(
        value=1e-6,
        reason="a cumulative sum of 16 float32 probabilities against float64: 16 roundings of at most 2**-24",
    ),
    "sample_chi_square": Tolerance(
        value=30.0,
        reason="7 degrees of freedom: a right sampler exceeds it for 1 of 10,000 seeds, and the seed is fixed; 4096 "
        "draws with one of 8 probabilities off by a fifth exceed it",
    ),
    "rms_norm": Tolerance(
        value=2e-6,
        reason="absolute, results of size 1 to 4; a mean of up to 576 squares, a root and two products in float32",
    ),
    "rope": Tolerance(
        value=2e-6,
        reason="absolute, inputs of size 1 to 4; cosine, sine, two products and a sum in float32",
    ),
    "rope_distance": Tolerance(
        value=1e-4,
        reason="absolute, a score of 64 products of size 1; angles up to 109 are rounded to 24 bits, 4e-6 each",
    ),
    "attention": Tolerance(
        value=2e-6,
        reason="relative to the largest value; float32 scores, exponentials and sums over up to 600 keys against "
        "float64 or against the same sums in another order",
    ),
    "demo_logits": Tolerance(
        value=2e-3,
        reason="absolute, demo logits of size up to 44; float32 sums in another order through 30 layers with outlier "
        "channels: 1.3e-4 measured; another choice of expert moves them by more than 0.1",
    ),
    "router_tie": Tolerance(
        value=1e-5,
        reason="absolute, the demo's scores, nearly equal on purpose (weights of 1); float32 rounding of the "
        "hidden states moves one by up to 3e-6, so that closer experts may change places; exact ties measured",
    ),
    "demo_dense": Tolerance(
        value=0.02,
        reason="absolute, demo logits of size up to 44; the same products summed by expert, whose weights "
        "are nearly and not exactly 1 (8 times renormalised scores): 3e-3 measured",
    ),
    "perplexity": Tolerance(
        value=1e-4,
        reason="relative, of a tiny model; log-probabilities differ by the order of float32 sums (see same_logits) and "
        "their mean by less; a token or a window counted twice moves it by more than 1e-3",
    ),
    "latent_attention": Tolerance(
        value=3e-6,
        reason="relative to the largest value; like attention, with two more float32 products of up to 16 terms, whose "
        "order differs between the forms",
    ),
    "layer_norm": Tolerance(
        value=4e-6,
        reason="absolute, results of size 1 to 5 plus a bias; two means of up to 128 terms, a root and two products in "
        "float32",
    ),
    "yarn": Tolerance(
        value=2e-7,
        reason="relative; float64 throughout, rounded to float32 once (2**-24 = 6e-8), against powers in another order",
    ),
    "yarn_by_hand": Tolerance(value=1e-5, reason="relative; shares of the ramp written with six digits"),
    "router_product": Tolerance(
        value=1e-5,
        reason="relative; the same behind a float32 product of 64 terms, whose absolute error moves a score's exponent",
    ),
    "hyper": Tolerance(
        value=4e-6,
        reason="absolute, results of size 1 to 10; a float32 product of 96 terms, a root, a sigmoid and four products",
    ),
    "hyper_size": Tolerance(
        value=1e-3,
        reason="absolute, mixes of size up to 100; streams of size 1.25 or more, against which the norm's epsilon of "
        "1e-5 is 6e-6 of their mean square: 3e-6 of a gate's logit",
    ),
    "int8_cache_logits": Tolerance(
        value=0.03,
        reason="median over tokens of the logits' root mean square error in their standard deviations; INT8 keys, "
        "values and latents against float32 ones: at most 0.016 measured",
    ),
    "int8_token_logits": Tolerance(
        value=0.1,
        reason="likewise with INT8 weights and activations: 0.3 % of a step in each of up to 6 layers of tiny width",
    ),
    "int4_token_logits": Tolerance(
        value=0.6,
        reason="likewise with INT4 experts rounded to nearest: a step is a seventh of a group's largest weight",
    ),
    "rounding_scale": Tolerance(
        value=2e-6,
        reason="relative; two float32 sums of up to 40 products of one sign, a quotient and a product of scales",
    ),
    "rounding_norm": Tolerance(
        value=5e-7,
        reason="relative to the weighted norm of the group; weights in units of their scale, a factor and the new "
        "scale are each rounded to 24 bits, and the errors that are compared are float32 sums of 16",
    ),
    "gptq_scale": Tolerance(
        value=2e-5,
        reason="relative; the largest of a group of weights that carry the errors of up to 300 others, by float32 "
        "products and a float32 factorisation of a Hessian with a condition of 1e4",
    ),
    "gptq_error": Tolerance(
        value=0.02,
        reason="relative, of the output error; float32 targets differ from float64 ones by up to 1e-4 of an INT8 step, "
        "so that a few integers are rounded the other way and others make up for it",
    ),
    "shrink": Tolerance(value=1e-6, reason="relative; two products, a sum and a quotient in float32"),
    "rotation": Tolerance(
        value=1e-6,
        reason="relative to the norm; 10 passes of float32 sums, a sign and a factor: 12 roundings of 2**-24",
    ),
    "rotated_logits": Tolerance(
        value=5e-5,
        reason="absolute, tiny logits; every weight is rounded to float32 once more and every sum runs over other "
        "terms: 1.8e-5 measured; one gain that is left behind moves logits by more than 1e-1",
    ),
    "sqnr": Tolerance(
        value=1e-6, reason="relative, of decibels; two float32 sums of up to 10,000 squares in another order"
    ),
    "moment": Tolerance(
        value=2e-5,
        reason="relative to the largest; float32 sums of squares or products of up to 104 tokens, which a norm or two "
        "float32 products of 64 terms made",
    ),
    "spread": Tolerance(
        value=2e-6,
        reason="relative; float32 sums of up to 200 powers of values below one, each of at most three products",
    ),
    "sensitivity": Tolerance(
        value=2e-4,
        reason="relative; sums of squares of differences that are 1/100 of results with float32 rounding of 2**-24: a "
        "difference has 2**-17 of its own size, its square twice that, and outputs near the edge of a step may differ",
    ),
    "learned_scale": Tolerance(
        value=1e-5,
        reason="relative; quotient of two float32 quadratic forms of up to 150 terms with cancellation",
    ),
    "learned_norm": Tolerance(
        value=2e-6,
        reason="relative to the norms of weight and inputs; errors are float32 differences of weights and products, "
        "and costs sums of 40 products of them",
    ),
}
