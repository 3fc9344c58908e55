"""LLM: a checkpoint folder, loaded and compiled on a mesh, that answers prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmoe.assets import asset
from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.engine import Engine
from jaxmoe.engine.request import Completion, SamplingParams
from jaxmoe.engine.runner import Runner
from jaxmoe.engine.tokenizer import Tokenizer
from jaxmoe.log import logger
from jaxmoe.parallel import mesh as meshes
from jaxmoe.parallel.plan import Plan, load_plan
from jaxmoe.weights.load import ModelFiles, load_leaves, open_model

Progress = Callable[[int, int], None]


def choose_plan(family: str, devices: int, path: Path | None = None) -> Plan:
    """The plan of a file, or the bundled one of the family or of all, on a number of devices.

    Raises:
        ConfigError, PlanError: it is absent or does not fit.
    """
    if path is None:
        own = asset("sharding") / family / "cpu8.toml"
        path = own if own.exists() else asset("sharding", "default", "cpu8.toml")
    return load_plan(path).with_devices(devices)


def load_runner(files: ModelFiles, plan: Plan, config: EngineConfig, progress: Progress | None = None) -> Runner:
    """Loads a checked checkpoint onto the plan's mesh.

    Raises:
        PlanError: fewer devices than the plan needs.
        WeightsError: a tensor holds an illegal value.
    """
    mesh = meshes.make(plan.mesh)
    if config.dtype == "bfloat16" and mesh.devices.flat[0].platform == "cpu":
        # Measured (jax 0.10.2): the conversion of one layer is moved out of the loop over layers as that of all.
        logger.warning(
            "dtype bfloat16 on CPU: XLA widens all float weights to float32 in every step, which takes twice their "
            "memory again, and time; float32 is better here"
        )
    leaves, arrays = load_leaves(files, plan, mesh, config.dtype, progress)
    return Runner(manifest=files.manifest, leaves=leaves, arrays=arrays, plan=plan, mesh=mesh, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Text and tokens of one completion."""

    text: str
    completion: Completion


class LLM:
    """An offline model: prompts in, answers out, many at once."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, *, poison: bool = False):
        """Compiles and warms up; afterwards nothing compiles."""
        self.tokenizer = tokenizer
        self.engine = Engine(runner, eos_ids=tokenizer.eos_ids, poison=poison)
        self.engine.warm_up()

    @classmethod
    def load(
        cls, folder: Path, *, devices: int = 1, plan: Path | None = None, config: EngineConfig | None = None
    ) -> "LLM":
        """Loads a checkpoint folder.

        Args:
            folder: config.json, weights, tokenizer.
            devices: devices of the mesh.
            plan: a sharding plan; None: the family's bundled one.
            config: engine settings; None: the defaults.

        Raises:
            JaxMoeError: see `open_model`, `choose_plan`, `Tokenizer`.
        """
        files = open_model(folder)
        chosen = choose_plan(files.manifest.config.family, devices, plan)
        tokenizer = Tokenizer(folder, files.manifest.config.vocab)
        return cls(load_runner(files, chosen, config or EngineConfig()), tokenizer)

    def generate(self, prompts: Sequence[str], params: SamplingParams, *, chat: bool = False) -> list[Answer]:
        """Answers prompts, in their order.

        Args:
            prompts: texts.
            params: sampling parameters of all of them; row i draws with seed + i.
            chat: wraps each prompt as a user message in the chat template.

        Raises:
            RequestError: a prompt is empty or too long; nothing runs then.
        """
        return self.generate_ids([encode_prompt(self.tokenizer, prompt, chat=chat) for prompt in prompts], params)

    def generate_ids(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
        """`generate` of token ids.

        Raises:
            RequestError: a prompt is empty or too long; nothing runs then.
        """
        return [
            Answer(text=self.tokenizer.decode(completion.token_ids), completion=completion)
            for completion in self.engine.generate(prompts, params)
        ]


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt, as it is or as a user message in the checkpoint's chat template.

    Raises:
        RequestError: there is no template, or it refuses the message.
    """
    return tokenizer.encode_chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
