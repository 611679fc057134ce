"""Variables that the sections `env` give to processes, and those that they may not give.

slimrl sets some variables itself, from other settings or from the machine; SGLang overwrites others. A recipe's value
would be lost, or contradict the setting that it comes from.
"""

import re
from collections.abc import Iterator, Mapping

from slimrl.config.problems import Violation
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_GPUS = "slimrl, from the GPUs that Ray gives the process"
_TEMPORARY = "slimrl: what is left of a run is found by its folder of temporary files"
_MALLOC = "slimrl, which on a CPU keeps freed memory for the next step"

TRAINER_OWNED = {
    "OMP_NUM_THREADS": "trainer.threads_per_rank",
    "MKL_NUM_THREADS": "trainer.threads_per_rank",
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "TMPDIR": _TEMPORARY,
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "slimrl, for each rank"),
}
"""Variables of trainer processes -> what sets them."""

_TOKENS = "slimrl, to off: engines return log-probs of the distribution that they sample from"
_WEIGHTS = "slimrl, to off: a resync could not place weights in such an engine"
_PORTS = "slimrl, to off: no key of the run would protect it"

ENGINE_PINNED = {
    **dict.fromkeys(
        (
            "SGLANG_RETURN_ORIGINAL_LOGPROB",
            "SGLANG_SANITIZE_NAN_LOGITS",
            "SGLANG_SIMULATE_UNIFORM_EXPERTS",
            "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
        ),
        ("0", _TOKENS),
    ),
    "SGLANG_SIMULATE_ACC_LEN": ("-1", _TOKENS),
    **dict.fromkeys(
        (
            "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
            "SGLANG_SHARED_EXPERT_TP1",
            "SGLANG_ENABLE_EMBED_REPLICATION",
            "SGLANG_FORCE_FP8_MARLIN",
            "SGLANG_CPU_QUANTIZATION",
            "SGLANG_MOE_PADDING",
            "SGLANG_FORCE_MXFP8_BLOCK_CONVERT_DENSE",
        ),
        ("0", _WEIGHTS),
    ),
    "SGLANG_RUST_SERVER": ("0", _PORTS),
    "SGLANG_EXPOSE_OWN_ENV_VARS": ("0", _PORTS),
    "SGLANG_PLUGINS": ("", "slimrl, to all: its own is one of them"),
}
"""Variables with which an engine would answer otherwise than slimrl takes its answers -> SGLang's default, which each
engine gets whatever the shell has, and who sets it."""

_CODE = "the shell alone, since it has the engine run code of others"

ENGINE_OWNED = {
    **{name: owner for name, (_, owner) in ENGINE_PINNED.items()},
    **dict.fromkeys(("SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_PLATFORM", "SGLANG_HTTP_SERVER_APP_PATH"), _CODE),
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "deterministic",
    "OMP_NUM_THREADS": "rollout.threads_per_engine",
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "TMPDIR": _TEMPORARY,
    "CUDA_DEVICE_MAX_CONNECTIONS": "SGLang, which overwrites it",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "slimrl: the check of a paused engine's health must not generate",
    "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "slimrl, for each engine",
    "SGLANG_USE_CPU_ENGINE": "slimrl, by what the machine has",
    "SGLANG_CPU_OMP_THREADS_BIND": "rollout.threads_per_engine",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "slimrl, to off where ranks share the memory of a machine",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "rollout.colocated",
    "SGLANG_MAMBA_CONV_DTYPE": "trainer.precision",
    "SGLANG_DISABLE_DSA_INDEXER_FUSION": "slimrl, to on: a resync could not verify the weights of fused indexers",
    "MALLOC_MMAP_THRESHOLD_": _MALLOC,
    "MALLOC_TRIM_THRESHOLD_": _MALLOC,
    "MALLOC_TOP_PAD_": _MALLOC,
}
"""Variables of engine processes -> what sets them."""

DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}
"""Variables that make Transformer Engine, cuBLAS and NCCL add numbers in the same order each time; they matter on GPUs
only."""

NCCL_CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
SGLANG_CHANNELS = "SGLANG_DETERMINISTIC_NCCL_NCHANNELS"
"""How many channels SGLang gives NCCL for deterministic inference; 8 by default."""

FP8_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Set to 1, Transformer Engine's scales of block FP8 are any float32, as the engines' are, and not powers of two."""

READ_AT_START = re.compile(r"(LD_|PYTHON|MALLOC_|GLIBC_|OMP_|GOMP_|KMP_|MKL_|RAY_).*|TORCH_LOGS")
"""Variables that the loader, Python, Ray and libraries of threads read as a process begins. A trainer's process gets
`trainer.env` a moment later: Ray, which could give it at once, writes the values into its own logs."""


def thread_variables(threads: int) -> dict[str, str]:
    """What limits the CPU threads of a process."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def trainer_variables(recipe: Recipe, inherited: Mapping[str, str]) -> dict[str, str]:
    """What slimrl sets for each trainer process.

    Args:
        inherited: the driver's environment, where a variable takes the place of some defaults.
    """
    trainer = recipe.trainer
    variables = thread_variables(trainer.threads_per_rank) | nccl_variables(recipe, inherited)
    if trainer.parallel.tensor > 1:
        # One queue: a GPU begins kernels in the order of their launches, so that a collective of the tensor-parallel
        # group, launched first, overlaps with the matrix product that Megatron launches after it.
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if trainer.fp8 is Fp8Scaling.blockwise:
        variables[FP8_SCALES] = inherited.get(FP8_SCALES, "1")
    if recipe.deterministic:
        variables |= DETERMINISTIC
    return variables


def engine_variables(recipe: Recipe, inherited: Mapping[str, str]) -> dict[str, str]:
    """What slimrl sets for each engine's actor, and so for its server; see `trainer_variables`."""
    return thread_variables(recipe.rollout.threads_per_engine) | nccl_variables(recipe, inherited)


def nccl_variables(recipe: Recipe, inherited: Mapping[str, str]) -> dict[str, str]:
    """Settings that all members of an NCCL group need alike, for trainer and engines with `p2p`.

    SGLang sets them in its own processes alone, by these rules: the first two where the environment does not
    (_set_envs_and_config of its entrypoints/engine.py), the channels always (arg_groups/attention_hook.py).
    """
    if recipe.resync.transport is not TransportName.p2p:
        return {}
    sglang = recipe.rollout.sglang
    cumem, nvls = inherited.get("NCCL_CUMEM_ENABLE", "0"), inherited.get("NCCL_NVLS_ENABLE", "0")
    if sglang.get("enable_symm_mem"):
        cumem = nvls = "1"
    elif sglang.get("enable_nccl_nvls"):
        nvls = "1"
    variables = {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": nvls}
    if recipe.rollout.engine_tp > 1 and (recipe.deterministic or sglang.get("enable_deterministic_inference")):
        channels = recipe.rollout.env.get(SGLANG_CHANNELS, inherited.get(SGLANG_CHANNELS, "8"))
        return variables | dict.fromkeys((SGLANG_CHANNELS, *NCCL_CHANNELS), channels)
    return variables | {name: inherited[name] for name in NCCL_CHANNELS if name in inherited}


def environment_violations(
    recipe: Recipe, *, trainer: bool, engines: bool, teacher: bool = False
) -> Iterator[Violation]:
    """Variables of `trainer.env`, `rollout.env` and `teacher.env` that are not the recipe's to give.

    Args:
        trainer: the command starts trainer processes.
        engines: the command starts engines.
        teacher: the command uses a teacher.
    """
    if trainer:
        yield from _violations("trainer.env", recipe.trainer.env, _trainer_owned(recipe))
        for name in recipe.trainer.env.keys() - TRAINER_OWNED.keys():
            if READ_AT_START.fullmatch(name):
                yield (
                    f"trainer.env.{name}",
                    "is read before slimrl could set it. Set it where Ray starts, on each node.",
                )
    if engines:
        yield from _violations("rollout.env", recipe.rollout.env, ENGINE_OWNED | _of_both_ends(recipe))
    if teacher:
        yield from _violations("teacher.env", recipe.teacher.env, ENGINE_OWNED)


def _trainer_owned(recipe: Recipe) -> dict[str, str]:
    """TRAINER_OWNED, and the variables that only some recipes have slimrl set."""
    one_queue = (
        f"slimrl: with trainer.parallel.tensor {recipe.trainer.parallel.tensor} communication overlaps only with 1"
    )
    owned = TRAINER_OWNED | _of_both_ends(recipe)
    reasons = {"CUDA_DEVICE_MAX_CONNECTIONS": one_queue, **dict.fromkeys(DETERMINISTIC, "deterministic")}
    given = trainer_variables(recipe, {})
    return owned | {name: reason for name, reason in reasons.items() if name in given}


def _of_both_ends(recipe: Recipe) -> dict[str, str]:
    """Variables that trainer and engines need alike, and so get from one place."""
    if recipe.resync.transport is not TransportName.p2p:
        return {}
    reason = "slimrl, alike for trainer and engines of one NCCL group. Set it where slimrl is started"
    return dict.fromkeys(("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", *NCCL_CHANNELS), reason)


def _violations(section: str, given: dict[str, str], owned: dict[str, str]) -> Iterator[Violation]:
    for name in given:
        if name in owned:
            yield f"{section}.{name}", f"is set by {owned[name]}."
        elif not _NAME.fullmatch(name):
            yield f"{section}.{name}", "is no name of a variable: letters, digits and _, not a digit first."
