"""A user's program, for mypy --strict: every public name in use. It is not run.

An ignored error that mypy does not find fails too, so these lines say what types must refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import sparsecomm
from sparsecomm import checkpoint, fsdp, optim
from sparsecomm import functional as sf


def states(group: dist.ProcessGroup) -> list[sparsecomm.CompressionState]:
    schedule = sparsecomm.ThresholdSchedule(between="sampled", period=16)
    schedules = [schedule, sparsecomm.ThresholdSchedule.oktopk(), schedule.exact()]
    minute = timedelta(minutes=1)
    oktopk = sparsecomm.OkTopkState(0.01, group, schedule=schedules[0], timeout=minute)
    sparsecomm.OkTopkState(density="high")  # type: ignore[arg-type]
    sparsecomm.TopkState(schedule="exact")  # type: ignore[arg-type]
    warmup = sparsecomm.DensityWarmup(100, (0.25, 0.05))
    compression = sparsecomm.Compression(algorithm="auto", density=0.02, warmup=warmup)
    sparsecomm.GTopkState(momentun=0.9)  # type: ignore[call-arg]
    oktopk.densty = 0.5  # type: ignore[attr-defined]
    oktopk.density = 2 * oktopk.density
    return [
        oktopk,
        sparsecomm.TopkState(0.02, value_codec="bf16", threads=2, seed=1),
        sparsecomm.AutoState(named_parameters=[("weight", torch.zeros(3))]),
        sparsecomm.DenseOverlapState(transport="c10d", stall_limit=None),
        sparsecomm.OkTopkState(
            communicator_options=sparsecomm.CommunicatorOptions(transport="c10d", threads=2)
        ),
        sparsecomm.DenseOverlapState(stal_limit=None),  # type: ignore[call-arg]
        sparsecomm.CompressionState(compression, group),
        sparsecomm.QuantizedTopkState(quantize=8),
        sparsecomm.BlockTopkState(block=512),
        sparsecomm.GaussianKState(dense_steps=10),
        sparsecomm.GTopkState(clip_norm=1.0, densities={"head": 0.1}),
        sparsecomm.TopkDsaState(momentum=0.9),
    ]


def tuned(start: Callable[..., Callable[[], object]]) -> sparsecomm.OkTopkState:
    tuning = sparsecomm.autotune(start, {"density": (0.01, 0.1)}, trials=5)
    assert_type(tuning, sparsecomm.Tuning)
    trial: sparsecomm.TuningTrial = tuning.trials[0]
    print(trial.seconds, tuning)
    sparsecomm.autotune(start, trails=5)  # type: ignore[call-arg]
    return sparsecomm.OkTopkState(**tuning.best)


def prepared(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> float:
    state = sparsecomm.prepare(
        ddp,
        optimizer,
        density=0.05,
        total_steps=1000,
        algorithm="auto",
        clip_norm=1.0,
        scaler=torch.amp.GradScaler("cpu"),
        transport="c10d",
    )
    sparsecomm.prepare(ddp, optimizer, density="0.05")  # type: ignore[arg-type]
    sparsecomm.prepare(ddp, optimizer, momentum=0.9)  # type: ignore[call-arg]
    return state.density


def hooks(ddp: DistributedDataParallel, state: sparsecomm.CompressionState) -> dict[str, Any]:
    sparsecomm.register_comm_hook(ddp, state)
    sparsecomm.register_comm_hook(state, ddp)  # type: ignore[arg-type]
    ddp.register_comm_hook(sparsecomm.AutoState(), sparsecomm.auto_hook)
    ddp.register_comm_hook(sparsecomm.OkTopkState(), sparsecomm.oktopk_hook)
    ddp.register_comm_hook(sparsecomm.TopkState(), sparsecomm.topk_hook)
    ddp.register_comm_hook(sparsecomm.DenseOverlapState(), sparsecomm.dense_overlap_hook)
    every = sparsecomm.compression_hook
    ddp.register_comm_hook(sparsecomm.CompressionState(state.compression), every)
    ddp.register_comm_hook(sparsecomm.QuantizedTopkState(), sparsecomm.quantized_topk_hook)
    ddp.register_comm_hook(sparsecomm.GaussianKState(), sparsecomm.gaussian_k_hook)
    ddp.register_comm_hook(sparsecomm.GTopkState(), sparsecomm.gtopk_hook)
    ddp.register_comm_hook(sparsecomm.TopkDsaState(), sparsecomm.topk_dsa_hook)
    ddp.register_comm_hook(sparsecomm.BlockTopkState(), sparsecomm.block_topk_hook)
    state.follow(torch.amp.GradScaler("cpu"))
    state.load_state_dict(state.state_dict())
    state.reconnect(dist.new_group([0, 2]))
    state.reconnect("gloo")  # type: ignore[arg-type]
    return state.stats()


def optimizers(model: torch.nn.Module, group: dist.ProcessGroup) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    opt = optim.OkTopkSGD(named, lr=0.1, density=0.01, lr_in_accumulator=True)
    optim.OkTopkSGD(named, densty=0.01)  # type: ignore[call-arg]
    optim.TopkSGD(model.parameters(), select=512)  # type: ignore[arg-type]
    with opt.no_sync():
        assert_type(opt.exchange, sparsecomm.CompressionState)
    opt.synchronize()
    torch.optim.lr_scheduler.StepLR(opt, 10)
    opt.compare_parameters()
    opt.load_state_dict(opt.state_dict())
    wrapped = optim.DistributedOptimizer(
        torch.optim.RMSprop(model.parameters()),
        named_parameters=named,
        compression=sparsecomm.Compression(algorithm="auto"),
        process_group=group,
    )
    assert_type(wrapped, optim.DistributedOptimizer)
    return [
        opt,
        wrapped,
        optim.TopkSGD(model.parameters(), 0.1, 0.9, nesterov=True),
        optim.QuantizedTopkSGD(named, quantize=2, average=False),
        optim.OkTopkAdam(named, betas=(0.9, 0.99), first_moment=0.9),
        optim.OkTopkAdamW([{"params": named, "lr": 0.1}], betas=(0.0, 0.99), momentum=0.9),
    ]


def resume(path: str, state: sparsecomm.CompressionState) -> None:
    planner = checkpoint.ReshardingLoadPlanner(allow_partial_load=True)
    load({"state": state}, checkpoint_id=path, planner=planner)


def sharded(model: torch.nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    state = fsdp.apply(model, sparsecomm.Compression(density=0.02), mesh["replicate"])
    fsdp.apply(model, 0.02, mesh)  # type: ignore[arg-type]
    assert_type(fsdp.apply_reduce_scatter(model, 0.02), fsdp.ReduceScatterState)
    return state.stats()


class Writer:
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> None: ...


def statistics(state: sparsecomm.CompressionState, writer: Writer) -> str:
    sparsecomm.report_at_exit(state)
    with sparsecomm.timeline("run.json") as recording:
        assert_type(recording, sparsecomm.Timeline)
    print(recording.path)
    sparsecomm.write_stats(writer, state, step=7)
    sparsecomm.write_stats(print, state)  # type: ignore[arg-type]
    return sparsecomm.report(state, state)


def backend(store: TCPStore) -> dict[str, Any]:
    sparsecomm.announce_aggregators(store, ["10.0.0.7:7000"])
    options = sparsecomm.Options(aggregators="store", block_bytes=512)
    dist.init_process_group("sparsecomm", pg_options=options)
    return sparsecomm.backend_stats()


def collectives(tensor: Tensor) -> None:
    with sparsecomm.Communicator.from_process_group(transport="ucx") as communicator:
        assert_type(communicator.counters(), dict[str, int])
        total = sparsecomm.allreduce(tensor, op="avg", communicator=communicator)
        assert_type(total, Tensor)
        work = sparsecomm.allgather_sparse(tensor, async_op=True)
        assert_type(work, sparsecomm.Work[list[Tensor]])
        try:
            assert_type(work.wait(), list[Tensor])
        except sparsecomm.CancelledError:
            assert_type(work.cancel(), bool)
        group = sparsecomm.grouped_allreduce([tensor, tensor], name="group")
        assert_type(sparsecomm.join(), int)
        assert_type(group, list[Tensor])
        assert_type(
            sparsecomm.grouped_allreduce([tensor], async_op=True),
            sparsecomm.Work[list[Tensor]],
        )
        part = sparsecomm.reduce_scatter_sparse(tensor, async_op=True)
        assert_type(part.get_future(), torch.futures.Future[Tensor])
        sparsecomm.allreduce(tensor, comunicator=communicator)  # type: ignore[call-overload]


def groups() -> sparsecomm.Options:
    options = sparsecomm.Options(transport="ucx", stall_limit=None, aggregators=["one:7000"])
    sparsecomm.Options(bandwidth=3)  # type: ignore[call-arg]
    dist.init_process_group("sparsecomm", pg_options=options)
    return options


def planning() -> list[str]:
    link = sparsecomm.Link.parse("25gbit", latency="20us")
    plan = sparsecomm.explain(1_000_000, 0.01, link=link, ranks=8)
    assert_type(plan, sparsecomm.Explanation)
    best: sparsecomm.Prediction = plan.best
    names = [row.algorithm for row in plan.ranking]
    sparse: sparsecomm.StepPrediction | None = plan.best_sparse
    names += [] if sparse is None else [sparse.method]
    return [*names, best.index_codec, sparsecomm.__version__, *sparsecomm.build_info()]


def operators(gradient: Tensor, residual: Tensor) -> Tensor:
    threshold: sf.Threshold = sf.threshold_exact(gradient, 10, residual=residual)
    sf.threshold_sampled(gradient, 10)
    magnitude = sf.threshold_gaussian(gradient, 10).magnitude
    sent: sf.SparseVector = sf.fused_error_feedback(gradient, residual, threshold=threshold)
    parts = [sent, sf.select(gradient, magnitude.item()), sf.top_k(gradient, 10, bucket=512)]
    total = sf.sparse_sum(parts, gradient.numel())
    assert_type(sf.sparse_intersection(sent, total, gradient.numel()), sf.Intersection)
    codes = sf.qsgd_quantize(residual, 4, seed=1)
    sf.qsgd_quantize(residual, 3, seed=1)  # type: ignore[arg-type]
    dense = sf.qsgd_dequantize(codes, residual.numel(), 4)
    largest: sf.Blocks = sf.block_top_k(dense, 3, 16)
    dense = sf.block_scatter_(dense, largest.numbers, sf.block_gather(dense, largest.numbers, 16))
    blocks: sf.BlockScan = sf.block_scan(sf.qsgd_dequantize_add_(dense, codes, 4), 16)
    assert_type(blocks.bitmap, Tensor)
    return sf.scatter_(gradient, total.indices, total.values, divisor=2)
