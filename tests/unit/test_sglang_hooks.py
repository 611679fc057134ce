"""The hooks in SGLang's engine process, called with stand-ins for what SGLang gives them."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

from slimrl.engines.plugin import hooks, norm_dtype, olmoe_norms, read_weights, version_loader, weight_updates
from slimrl.engines.plugin.cpu import batched_attention, mock, sgl_kernel_stub, torchvision_stub, triton_stub
from slimrl.engines.plugin.cpu import install as install_stand_ins
from slimrl.engines.plugin.cpu.attention_data_parallel import reduce_scatterv
from slimrl.engines.plugin.cpu.decode_cache import DecodeCache
from slimrl.engines.plugin.cpu.head_padding import around_adjust_config
from slimrl.engines.plugin.cpu.seeded_sampling import (
    after_from_schedule_batch,
    multinomial_with_seed,
    sampling_from_probs,
)
from slimrl.engines.plugin.hooks import after_wait_until_ready
from slimrl.engines.plugin.scheduler import (
    after_add_request_to_queue,
    after_get_internal_state,
    after_init_idle_sleeper,
    after_paused_round,
    around_version_change,
    event_loop,
    flush_cache,
)


class Request:
    def __init__(self, finished: bool) -> None:
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


def test_requests_under_way_are_counted_once_and_finished_ones_not():
    running, prefilled, done = Request(False), Request(False), Request(True)
    for chunked, expected in ((None, 1), (running, 1), (prefilled, 2), (done, 1)):
        state = internal_state(collect_inflight_reqs=lambda: [running, done], chunked_req=chunked)
        assert (state["other"], state["slimrl_running_requests"]) == (1, expected)


def internal_state(**of_scheduler) -> dict:
    usage = SimpleNamespace(get_max_pool_usage=lambda: 0.25)
    pools = SimpleNamespace(get_pool_stats=lambda: usage)
    idle = {"collect_inflight_reqs": list, "chunked_req": None, "pool_stats_observer": pools}
    scheduler = of_scheduler.pop("scheduler", SimpleNamespace())
    vars(scheduler).update(idle | of_scheduler)
    answer = SimpleNamespace(internal_state={"other": 1})
    return after_get_internal_state(answer, SimpleNamespace(scheduler=scheduler), None).internal_state


def test_retracted_requests_are_counted_and_new_ones_are_not():
    scheduler = SimpleNamespace()
    assert internal_state(scheduler=scheduler)["slimrl_retractions"] == 0
    after_add_request_to_queue(None, scheduler, Request(False))
    for _ in range(2):
        after_add_request_to_queue(None, scheduler, Request(False), is_retracted=True)
    state = internal_state(scheduler=scheduler)
    assert (state["slimrl_retractions"], state["slimrl_token_usage"]) == (2, 0.25)


def running(outputs: int, **changes) -> SimpleNamespace:
    state = {"is_retracted": False, "inflight_middle_chunks": 0, "weight_version_events": [], "done": False} | changes
    return SimpleNamespace(output_ids=[5] * outputs, finished=lambda: state["done"], **state)


@pytest.mark.parametrize(("accepted", "counts"), [(None, [1, 1]), ([3, 2], [3, 2])])
def test_what_the_old_weights_have_sampled_unread_is_of_their_version(monkeypatch, accepted, counts):
    """SGLang's own bookkeeping, of requests in the midst of an answer and of others before their first token."""
    from sglang.srt import runtime_context
    from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

    serving = SimpleNamespace(weight_version="7")
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    talking, prefilled, idle = running(4), running(0), running(2)
    left_out = [running(1, done=True), running(1, is_retracted=True), running(0, inflight_middle_chunks=1)]
    requests = [talking, prefilled, *left_out]
    batch = SimpleNamespace(reqs=requests, spec_algorithm=SimpleNamespace(is_none=lambda: accepted is None))
    lengths = None if accepted is None else torch.tensor([*accepted, 1, 1, 1])
    scheduler = SimpleNamespace(result_queue=[(batch, SimpleNamespace(accept_lens=lengths, copy_done=None))])

    def change(scheduler: SimpleNamespace, new_version: str) -> None:
        if new_version != serving.weight_version:
            record_weight_version_events([*requests, idle], serving.weight_version)
            serving.weight_version = new_version

    def switch(request: SimpleNamespace) -> int:
        spans = compute_weight_version_spans(request.weight_version_events, serving.weight_version, 9)
        return next((span.start for span in spans if span.version == "8"), 9)

    for version in ("7", "8", "8"):
        around_version_change(change, scheduler, new_version=version)
    assert [switch(talking), switch(prefilled), switch(idle)] == [4 + counts[0], counts[1], 2]
    assert [switch(request) for request in left_out] == [1, 1, 0]
    # Without overlap there is no queue.
    around_version_change(change, SimpleNamespace(), new_version="9")
    assert [event.num_output_tokens for event in idle.weight_version_events] == [2, 2]


def test_a_paused_engine_sleeps_unless_requests_wait_to_be_taken_in():
    slept = []
    sleeper = SimpleNamespace(maybe_sleep=lambda: slept.append(True))
    for idle_sleeper, deferred in ((sleeper, ["a request"]), (None, [])):
        after_paused_round(None, SimpleNamespace(idle_sleeper=idle_sleeper, _deferred_input_requests=deferred))
    assert slept == []
    after_paused_round(None, SimpleNamespace(idle_sleeper=sleeper, _deferred_input_requests=[]))
    assert slept == [True]


@pytest.mark.parametrize(("is_writer", "readers", "unlinked"), [(True, 2, True), (False, 2, False), (True, 0, False)])
def test_the_writer_takes_the_name_of_the_queue_when_others_read_it(is_writer: bool, readers: int, unlinked: bool):
    calls = []
    buffer = SimpleNamespace(shared_memory=SimpleNamespace(unlink=lambda: calls.append(True)), is_creator=True)
    after_wait_until_ready(None, SimpleNamespace(_is_writer=is_writer, n_local_reader=readers, buffer=buffer))
    assert (calls == [True], buffer.is_creator) == (unlinked, not unlinked)


@pytest.fixture
def sglang_structs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.io_struct")
    module.UpdateWeightFromDiskReqOutput = lambda **given: given
    names = ("sglang", "sglang.srt", "sglang.srt.managers")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        "msgspec.structs.replace", lambda request, **changes: SimpleNamespace(**vars(request) | changes)
    )


def test_a_version_is_loaded_from_a_folder_that_all_ranks_have_and_that_is_held_meanwhile(
    monkeypatch: pytest.MonkeyPatch, sglang_structs
):
    held, reported = [], []

    @contextmanager
    def checkpoint(version: Path, local_dir, timeout_s) -> Iterator[Path]:
        assert (version, timeout_s) == (Path("/v/7"), 3.0)
        if local_dir is None:
            raise ValueError("w differs")
        held.append(local_dir)
        yield Path(local_dir)
        held.clear()

    def of_all_ranks(problem, group):
        reported.append((problem, group))
        return sorted({problem, *elsewhere} - {""})

    def original(manager, request):
        assert held or request.manifest is None or "slimrl_version" not in request.manifest
        return (manager, request.model_path)

    monkeypatch.setattr(version_loader, "_checkpoint", checkpoint)
    monkeypatch.setattr(version_loader, "_of_all_ranks", of_all_ranks)
    manager = SimpleNamespace(tp_cpu_group="ranks")

    def load(local_dir):
        request = SimpleNamespace(**version_loader.version_request("/v/7", local_dir, 3.0))
        return version_loader.around_update_from_disk(original, manager, request)

    elsewhere = set()
    assert load("/local") == (manager, "/local")
    assert held == []
    assert load(None) == {"success": False, "message": "w differs"}
    elsewhere = {"rank 1: no space"}
    assert load("/local") == {"success": False, "message": "rank 1: no space"}
    assert load(None) == {"success": False, "message": "rank 1: no space; w differs"}
    assert reported == [("", "ranks"), ("w differs", "ranks"), ("", "ranks"), ("w differs", "ranks")]
    # Requests of others are left to SGLang.
    for manifest in (None, {}, {"other": 1}):
        plain = SimpleNamespace(manifest=manifest, model_path="/m")
        assert version_loader.around_update_from_disk(original, manager, plain) == (manager, "/m")
    assert len(reported) == 4


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ("host-0", (["a", "b"], ["b"])),
        ("host-1", (["on host-0: a", "on host-1: b"], ["on host-1: b"])),
    ],
)
def test_the_problems_of_all_ranks_are_told_once_each_with_the_host_of_several(
    monkeypatch: pytest.MonkeyPatch, second: str, told: tuple[list[str], list[str]]
):
    def gather(gathered, own, group):
        assert group == "ranks"
        gathered[:] = [("host-0", ""), (second, "b"), own, (second, "b")]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 4)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    monkeypatch.setattr(version_loader.socket, "gethostname", lambda: "host-0")
    assert (version_loader._of_all_ranks("a", "ranks"), version_loader._of_all_ranks("", "ranks")) == told


@pytest.mark.parametrize(("asked", "placed", "told"), [(False, False, False), (False, True, True), (True, False, True)])
def test_what_a_model_derives_from_its_weights_is_derived_again_after_they_were_placed(
    asked: bool, placed: bool, told: bool
):
    model = SimpleNamespace()
    if placed:
        model.slimrl_placed_weights = True
    ended = []
    updater = SimpleNamespace(get_model=lambda: model)
    weight_updates.around_end_update(
        lambda updater, *, run_post_load: ended.append(run_post_load), updater, run_post_load=asked
    )
    assert ended == [told]
    # The next update begins with nothing placed.
    assert vars(model) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_delta_net_takes_the_dtype_of_the_engine_and_nothing_else_does(dtype: torch.dtype):
    norm, decay = torch.nn.LayerNorm(3, dtype=torch.float16), torch.nn.Parameter(torch.zeros(2))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        norm_dtype.after_init(None, SimpleNamespace(norm=norm, A_log=decay), "config", layer_id=3)
    finally:
        torch.set_default_dtype(before)
    assert (norm.weight.dtype, decay.dtype) == (dtype, torch.float32)
    norm_dtype.after_init_float32(None, SimpleNamespace(norm=norm, A_log=decay), "config", layer_id=3)
    assert norm.weight.dtype is torch.float32


def test_ranks_of_an_engine_norm_by_the_squares_of_all_their_heads(monkeypatch: pytest.MonkeyPatch):
    """Two ranks with half of the channels each; the sum over ranks is given."""
    torch.manual_seed(0)
    x, theirs = torch.randn(5, 8), OlmoeRMSNorm(8, eps=1e-2)
    theirs.weight.data.normal_()
    squares = {"attn_tp_all_reduce": lambda mean: 2 * x.square().mean(-1, keepdim=True)}
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.dp_attention", SimpleNamespace(**squares))
    for ranks, own in ((1, slice(8)), (2, slice(4)), (2, slice(4, 8))):
        norm = SimpleNamespace(weight=theirs.weight.data[own], variance_epsilon=1e-2, attn_tp_size=ranks)
        torch.testing.assert_close(olmoe_norms.forward(norm, x[:, own]), theirs(x).detach()[:, own])


def test_olmoe_keeps_sglangs_norms_where_they_fit():
    norms = {"q_norm": "theirs", "k_norm": "theirs"}
    attention = SimpleNamespace(num_heads=4, total_num_heads=4, total_num_kv_heads=4, **norms)
    olmoe_norms.after_init(None, attention)
    assert (attention.q_norm, attention.k_norm) == ("theirs", "theirs")


def test_messages_of_others_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("slimrl.engines.plugin.engine_ranks.EngineRanks", lambda: "ranks")
    monkeypatch.setattr(weight_updates, "update", lambda model, value, ranks: (model, ranks))
    updater = SimpleNamespace(get_model=lambda: "model")
    for name in ("map_memory", "load_round", "join_group", "receive_version"):
        value = {f"slimrl_{name}": 0}
        assert weight_updates.around_update(None, updater, value) == ("model", "ranks")
    assert weight_updates.around_update(lambda *given: given, updater, {"x": 1}) == (updater, {"x": 1})


def test_every_request_of_a_batch_has_a_seed_its_own_or_a_drawn_one():
    seeds = [5, None, 7, None]
    requests = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    batch = SimpleNamespace(reqs=requests)
    first, second = (
        after_from_schedule_batch(SimpleNamespace(sampling_seed=None), type, batch, 9).sampling_seed for _ in range(2)
    )
    assert first.dtype == torch.int64
    assert first[[0, 2]].tolist() == second[[0, 2]].tolist() == [5, 7]
    assert len({*first[[1, 3]].tolist(), *second[[1, 3]].tolist()}) == 4
    info = SimpleNamespace(sampling_seed="given")
    assert after_from_schedule_batch(info, type, batch, 9).sampling_seed == "given"
    probs, seeds, positions = torch.rand(40, 6), torch.arange(40), torch.arange(40)
    drawn = sampling_from_probs(probs, seeds, positions)
    assert (drawn.dtype, drawn.shape) == (torch.int32, (40,))
    assert torch.equal(multinomial_with_seed(probs.log(), seeds, positions)[:, 0], drawn.long())
    for given in ((None, positions), (seeds, None)):
        with pytest.raises(ValueError, match="without seeds"):
            sampling_from_probs(probs, *given)


def test_a_block_fp8_checkpoint_is_read_by_ours_and_others_by_sglang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    read = []

    @contextmanager
    def folder(path, dtype):
        read.append((path, dtype))
        yield SimpleNamespace(specs={"a": 0, "b": 0})

    monkeypatch.setattr("slimrl.checkpoints.hf_checkpoint.is_block_fp8", lambda path: path == tmp_path / "fp8")
    monkeypatch.setattr("slimrl.checkpoints.hf_checkpoint.open_hf_checkpoint", folder)
    monkeypatch.setattr("slimrl.checkpoints.checkpoint_reader.read_whole", lambda folder, name: f"tensor {name}")

    def load(name: str):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        config = SimpleNamespace(dtype=torch.bfloat16)
        source = SimpleNamespace(model_or_path=str(tmp_path / name), model_config=config, prefix="p.")
        return read_weights.around_weights_iterator(
            lambda loader, source, **kwargs: ("SGLang's", loader, kwargs), "loader", source, more=1
        )

    assert load("plain") == ("SGLang's", "loader", {"more": 1})
    assert list(load("fp8")) == [("p.a", "tensor a"), ("p.b", "tensor b")]
    assert read == [(tmp_path / "fp8", "bfloat16")]


@pytest.mark.parametrize("stored", ["released", "other order", "apart"])
def test_experts_that_are_stacked_in_another_order_than_released_ones_are_read_by_ours(tmp_path: Path, stored: str):
    stack = torch.arange(2 * 6 * 4, dtype=torch.float32).reshape(2, 6, 4)
    down = stack[:, :3].contiguous()
    tensors = {
        "released": {"experts.gate_up_proj": stack.transpose(1, 2).contiguous(), "experts.down_proj": down},
        "other order": {"experts.gate_up_proj": stack, "experts.down_proj": down.transpose(1, 2).contiguous()},
        "apart": {"experts.0.down_proj.weight": stack[0, :3].T.contiguous()},
    }[stored]
    prefix = "model.language_model.layers.0.mlp."
    save_file({prefix + name: value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    text = {"hidden_size": 4, "moe_intermediate_size": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text}))
    source = SimpleNamespace(model_or_path=str(tmp_path), model_config=SimpleNamespace(dtype=torch.float32), prefix="")
    given = read_weights.around_weights_iterator(lambda loader, source: "SGLang's", None, source)
    if stored != "other order":
        assert given == "SGLang's"
        return
    found = dict(given)
    experts = "model.layers.0.mlp.experts"
    assert torch.equal(found[f"{experts}.1.gate_proj.weight"], stack[1, :3])
    assert torch.equal(found[f"{experts}.1.up_proj.weight"], stack[1, 3:])
    assert torch.equal(found[f"{experts}.0.down_proj.weight"], stack[0, :3].T)
    assert len(found) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hooks of a CPU")
def test_a_hook_that_is_not_in_place_is_named(monkeypatch: pytest.MonkeyPatch):
    found = hooks.hooks()
    targets = [target for target, _, _ in found]
    assert len(set(targets)) == len(targets)
    # Those of CPU engines alone are among them.
    assert any("TorchNativeAttnBackend" in target for target in targets)
    registered = {}
    registry = SimpleNamespace(
        register=lambda target, function, kind: registered.update({target: (kind, function)}), _patched=set(targets)
    )
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry, module.HookType = registry, lambda kind: f"kind {kind}"
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hooks.register()
    assert registered == {target: (f"kind {kind}", function) for target, kind, function in found}
    hooks.require_applied()
    registry._patched -= {targets[3], targets[1]}
    with pytest.raises(RuntimeError, match="lacks what slimrl hooks into: ") as caught:
        hooks.require_applied()
    assert str(caught.value).endswith(": " + ", ".join(sorted([targets[3], targets[1]])))


def test_stand_ins_go_by_the_device_and_not_by_what_is_installed(monkeypatch: pytest.MonkeyPatch):
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "SGLANG_NCCL_SO_PATH"):
        monkeypatch.setenv(name, "as it was")
    given = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", given)
    stubs = {"sgl_kernel": sgl_kernel_stub, "torchvision": torchvision_stub, "triton": triton_stub}
    for name, stub in stubs.items():
        monkeypatch.setattr(stub, "install", lambda name=name: name != "triton")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert install_stand_ins() == []
    assert os.environ["TORCH_COMPILE_DISABLE"] == os.environ["SGLANG_NCCL_SO_PATH"] == "as it was"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "as it was"
    assert torch.get_device_module is given

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert install_stand_ins() == ["sgl_kernel", "torchvision"]
    assert os.environ["TORCH_COMPILE_DISABLE"] == os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert not Path(os.environ["SGLANG_NCCL_SO_PATH"]).exists()
    assert torch.get_device_module() is torch.get_device_module("cpu") is torch.cpu
    assert torch.get_device_module("cuda") is torch.cuda


@pytest.mark.parametrize("stub", [sgl_kernel_stub, torchvision_stub, triton_stub])
def test_a_stand_in_takes_the_place_of_what_is_installed_but_not_of_what_is_imported(
    monkeypatch: pytest.MonkeyPatch, stub: ModuleType
):
    name = stub.__name__.rpartition(".")[2].removesuffix("_stub")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if k.partition(".")[0] != name})
    assert stub.install() is True
    assert sys.modules[name].__spec__.loader is None
    mocks = dict(sys.modules)
    assert stub.install() is False
    assert sys.modules == mocks


def test_a_stand_in_can_be_imported_and_says_what_it_is_when_called(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in ("slimrl_no_such_package", "slimrl_no_such_package.below"):
        mock.enter(ModuleType(name))
    assert sys.modules["slimrl_no_such_package"].below is sys.modules["slimrl_no_such_package.below"]
    refuse = mock.unavailable("torchvision.ops.nms")
    assert refuse.__name__ == "nms"
    with pytest.raises(NotImplementedError, match=r"torchvision\.ops\.nms does not exist without a GPU"):
        refuse(1, a=2)


def test_new_cache_slots_go_to_each_requests_row_in_order():
    table = torch.full((4, 6), -1, dtype=torch.int32)
    rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
    sgl_kernel_stub.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([10, 11, 12, 13, 14]), 6)
    expected = torch.full((4, 6), -1, dtype=torch.int32)
    expected[2, 1:4] = torch.tensor([10, 11, 12])
    expected[0, :2] = torch.tensor([13, 14])
    assert torch.equal(table, expected)


def test_what_stands_in_for_triton_is_importable_decorates_and_is_false(monkeypatch: pytest.MonkeyPatch):
    entered = []
    monkeypatch.setattr(triton_stub, "enter", entered.append)
    triton = triton_stub._Mock("triton")

    def kernel() -> int:
        return 3

    assert triton.jit(kernel) is kernel
    assert triton.jit(do_not_specialize=["n"])(kernel) is kernel
    assert triton.autotune([1], key=["n"])(kernel) is kernel
    assert triton.heuristics([1])(kernel) is kernel
    assert not triton.runtime
    assert entered[0].__name__ == "triton.jit"
    assert issubclass(triton.OutOfResources, Exception)
    assert isinstance(triton.Config, type)
    language = triton_stub._Mock("triton.language")
    assert isinstance(language.constexpr, type)
    assert language.constexpr(4).value == 4
    assert not isinstance(language.load, type)
    with pytest.raises(AttributeError):
        triton.__path__  # noqa: B018
    assert [triton_stub._cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [triton_stub._next_power_of_2(n) for n in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]
    finder = triton_stub._Finder()
    assert finder.find_spec("triton.a.b").name == "triton.a.b"
    assert finder.find_spec("tritonless") is None


class Cache:
    def __init__(self, ready: bool) -> None:
        self.ready, self.calls = ready, []

    def begin_step(self, *given):
        self.calls.append("begin")

    def forget(self, requests):
        self.calls.append(requests)

    def attend(self, query, *given):
        self.calls.append("attend")
        return query + 1


@pytest.mark.parametrize(("is_decode", "rows", "planned"), [(True, 3, True), (True, 2, False), (False, 3, False)])
def test_a_decode_step_of_more_than_two_is_planned_and_all_else_is_forgotten(is_decode: bool, rows: int, planned: bool):
    backend = SimpleNamespace(slimrl_decode_cache=Cache(True), req_to_token_pool=SimpleNamespace(req_to_token=None))
    mode = SimpleNamespace(is_decode=lambda: is_decode)
    batch = SimpleNamespace(forward_mode=mode, seq_lens=torch.ones(rows), req_pool_indices=torch.arange(rows) + 4)
    batch._original_batch_size = None
    batched_attention.after_init_forward_metadata(None, backend, batch)
    assert backend.slimrl_decode_cache.calls == (["begin"] if planned else [[4 + i for i in range(rows)]])


@pytest.mark.parametrize(
    ("rows", "encoder", "cross", "ready", "dtype", "way"),
    [
        (3, None, False, True, torch.float32, "copy"),
        (2, None, False, True, torch.float32, "original"),
        (3, torch.ones(3), False, True, torch.float32, "original"),
        (3, None, True, True, torch.float32, "original"),
        (3, None, False, False, torch.float32, "pages"),
        (3, None, False, True, torch.bfloat16, "pages"),
    ],
)
def test_a_decode_batch_goes_the_way_that_knows_it(monkeypatch, rows, encoder, cross, ready, dtype, way):
    seen = []

    def paged(query, output, *given, scale, window, sinks):
        assert sinks is None
        seen.append((given[-2:], scale, window))
        return "pages"

    def original(backend, query, output, *given, **named):
        assert named == {"scaling": 0.5, "sliding_window_size": 7, "is_cross_attn": cross}
        assert given[-1] is encoder
        return "original"

    monkeypatch.setattr(batched_attention, "paged_attention", paged)
    query, output = torch.zeros(rows, 2, 4), torch.zeros(rows, 2, 4)
    pool = torch.zeros(8, 1, 4, dtype=dtype)
    lens = torch.arange(rows) + 5
    found = batched_attention.around_decode(
        original, SimpleNamespace(slimrl_decode_cache=Cache(ready)), query, output, pool, pool, None,
        torch.arange(rows), lens, encoder, scaling=0.5, sliding_window_size=7, is_cross_attn=cross,
    )  # fmt: skip
    if way == "copy":
        assert found is output
        assert (output == 1).all()
    else:
        assert found == way
    assert seen == ([(([4, 5, 6], [1, 1, 1]), 0.5, 7)] if way == "pages" else [])


@pytest.mark.parametrize(
    ("encoder", "causal", "is_original"), [(None, True, False), (torch.ones(1), True, True), (None, False, True)]
)
def test_a_prefill_that_is_causal_is_batched(monkeypatch, encoder, causal, is_original):
    monkeypatch.setattr(
        batched_attention, "paged_attention", lambda *given, scale, window, sinks: (given[-2:], scale, window)
    )

    def original(*given, **named):
        assert named == {"scaling": 0.5, "causal": causal, "sliding_window_size": None, "more": 1}
        return "original"

    output_T = torch.ones(4)
    found = batched_attention.around_extend(
        original, None, None, output_T, None, None, None, None, torch.tensor([5]), torch.tensor([3]), torch.tensor([2]),
        encoder, scaling=0.5, causal=causal, sliding_window_size=None, more=1,
    )  # fmt: skip
    assert found == ("original" if is_original else (([3], [2]), 0.5, None))
    # Two tokens of padding follow those of the request.
    assert output_T.tolist() == [1, 1, *([1, 1] if is_original else [0, 0])]


@pytest.mark.parametrize(("real", "planned"), [(4, True), (2, False)])
def test_rows_that_pad_a_decode_batch_are_nobodys(real: int, planned: bool):
    """Two of them, both of request 0, as SGLang appends them where another rank has more requests."""
    backend = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(200).view(10, 20)))
    batched_attention.after_init(None, backend, SimpleNamespace(max_total_num_tokens=4096))
    assert backend.get_cpu_graph_seq_len_fill_value() == 1
    requests = torch.tensor([*range(3, 3 + real), 0, 0])
    lengths = torch.tensor([*range(5, 5 + real), 1, 1])
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        seq_lens=lengths,
        req_pool_indices=requests,
        _original_batch_size=real,
    )
    batched_attention.after_init_forward_metadata(None, backend, batch)
    assert backend.slimrl_decode_cache.ready == planned
    torch.manual_seed(0)
    query, keys, values = torch.randn(real + 2, 2, 4), torch.randn(200, 1, 4), torch.randn(200, 1, 4)
    output = torch.full_like(query, torch.nan)
    found = batched_attention.around_decode(
        None, backend, query, output, keys, values, backend.req_to_token_pool.req_to_token, requests, lengths,
        scaling=0.5, sliding_window_size=None, is_cross_attn=False,
    )  # fmt: skip
    assert found is output
    for row in range(real):
        slots = backend.req_to_token_pool.req_to_token[requests[row], : lengths[row]]
        scores = (query[row].double() @ keys[slots, 0].double().T * 0.5).softmax(-1)
        assert torch.allclose(output[row].double(), scores @ values[slots, 0].double(), atol=1e-6)
    assert output.isfinite().all()


def of_ranks(monkeypatch: pytest.MonkeyPatch, **parallel) -> None:
    context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(**parallel))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)


def test_of_several_schedulers_only_the_first_sleeps_and_not_for_long(monkeypatch: pytest.MonkeyPatch):
    asked = []
    poller = SimpleNamespace(poll=lambda timeout_ms: asked.append(timeout_ms) or ["a message"])

    def sleeper_of(rank: int, *, grouped: bool, sleeps: bool = True):
        of_ranks(monkeypatch, tp_rank=rank, attn_dp_enabled=grouped)
        scheduler = SimpleNamespace(idle_sleeper=SimpleNamespace(poller=poller) if sleeps else None)
        after_init_idle_sleeper(None, scheduler)
        return scheduler.idle_sleeper

    for rank in (0, 1):
        assert sleeper_of(rank, grouped=False).poller is poller
        assert sleeper_of(rank, grouped=True, sleeps=False) is None
    assert sleeper_of(1, grouped=True) is None
    first = sleeper_of(0, grouped=True)
    assert first.poller.poll(1000) == first.poller.poll(7) == ["a message"]
    assert asked == [20, 7]


def test_requests_are_handed_to_the_schedulers_as_they_come_and_no_core_waits_for_them(monkeypatch: pytest.MonkeyPatch):
    class Ended(Exception):
        pass

    socket = SimpleNamespace(polls=[0, 1, 1], poll=lambda timeout_ms: timeout_ms >= 100 and socket.polls.pop(0))
    messages, handed, fed = ["a", "b"], [], []
    structs = SimpleNamespace(sock_recv=lambda of: messages.pop(0) if of is socket else None)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)

    def dispatch(message: str) -> None:
        handed.append(message)
        if message == "b":
            raise Ended

    watchdog = SimpleNamespace(feed=lambda: fed.append(True))
    with pytest.raises(Ended):
        event_loop(SimpleNamespace(recv_from_tokenizer=socket, _request_dispatcher=dispatch, soft_watchdog=watchdog))
    assert (handed, len(fed)) == (["a", "b"], 3)


@pytest.mark.parametrize(("good", "told"), [([True, True], "0"), ([True, False], "1"), ([False, False], "0")])
def test_caches_count_as_flushed_if_every_scheduler_has_flushed_its_own(monkeypatch, good: list[bool], told: str):
    structs = SimpleNamespace(FlushCacheReqInput=lambda timeout_s: timeout_s)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", structs)

    async def ask(timeout_s):
        assert timeout_s == 3.0
        return [SimpleNamespace(success=success, name=str(index)) for index, success in enumerate(good)]

    manager = SimpleNamespace(auto_create_handle_loop=lambda: None, flush_cache_communicator=ask)
    answer = asyncio.run(flush_cache(manager, 3.0))
    assert (answer.name, answer.success) == (told, all(good))


def test_sums_are_scattered_as_in_sglangs_deterministic_runs():
    group = SimpleNamespace(_deterministic_reduce_scatterv=lambda *given: given)
    given = (torch.ones(3), torch.ones(1), [1, 2])
    assert all(found is value for found, value in zip(reduce_scatterv(group, *given), given, strict=True))


def test_sglang_pads_the_columns_of_an_engine_on_a_cpu_but_not_its_heads():
    def pad(model_config, load_config, num_ranks):
        for config in (model_config, model_config.hf_config):
            config.num_attention_heads, config.num_key_value_heads = 2 * num_ranks, num_ranks
        model_config.hf_config.linear_num_key_heads_cpu = num_ranks
        model_config.hf_config.moe_intermediate_size = 32 * num_ranks
        return model_config, load_config

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    hf_config = SimpleNamespace(**heads, **linear, moe_intermediate_size=24)
    model_config = SimpleNamespace(**heads, hf_config=hf_config, hf_text_config=hf_config)
    assert around_adjust_config(pad, model_config, "load", 4) == (model_config, "load")
    assert (model_config.num_attention_heads, model_config.num_key_value_heads) == (4, 2)
    padded = {"linear_num_key_heads_cpu": 2, "linear_num_value_heads_cpu": 6, "moe_intermediate_size": 128}
    assert vars(hf_config) == heads | linear | padded


def test_the_dense_copy_may_be_twice_as_large_as_the_pool():
    backend = SimpleNamespace()
    batched_attention.after_init(None, backend, SimpleNamespace(max_total_num_tokens=1024))
    cache = backend.slimrl_decode_cache
    assert isinstance(cache, DecodeCache)
    table = torch.zeros(40, 200, dtype=torch.int64)
    for rows, length, fits in ((16, 128, True), (17, 128, False), (16, 129, False), (32, 64, True), (33, 64, False)):
        cache.begin_step(table, torch.arange(rows), torch.full((rows,), length))
        assert cache.ready == fits, (rows, length)
