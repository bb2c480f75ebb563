"""The algorithm "ina" through aggregators whose addresses users give."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import test_collectives
import torch
import torch.distributed as dist
from aggregators import aggregator, aggregators
from models import flat, make_ddp, make_model, train
from patience import LONG, LONG_TIME, wait_until
from ranks import run_ranks

import sparsecomm
from sparsecomm import Communicator, CommunicatorOptions, Compression, collectives
from sparsecomm.cli.measure import exchange_options

INA = "ina"


def connected(addresses: tuple[str, ...], **keywords: Any) -> Communicator:
    return Communicator.from_process_group(aggregators=addresses, timeout=LONG_TIME, **keywords)


def total_of_ranks() -> int:
    return sum(range(1, dist.get_world_size() + 1))


def own_tensor() -> torch.Tensor:
    return torch.full((1000,), dist.get_rank() + 1)


def _reduce(size: int, addresses: tuple[str, ...], transport: str) -> None:
    with connected(addresses, aggregator_transport=transport) as communicator:
        assert communicator.engine.services().count("aggregators") == (size > 1)
        group = dist.distributed_c10d._get_default_group()
        collectives._of_group[group] = communicator
        test_collectives.EXACT = (INA,)
        test_collectives.allreduce_matrix(size)
        test_collectives.dense_tensors_like_gloo(size)
        test_collectives.non_finite(size)
        if size != 2:  # 2048 + 1 is between two numbers of half precision
            test_collectives.rounding(size)
        # Large enough for several rounds of every stream.
        generator = torch.Generator().manual_seed(dist.get_rank())
        whole = torch.randint(-1000, 1000, (1 << 20,), generator=generator)
        broken = torch.randn(1 << 20, generator=generator)
        for tensor in (whole, whole.int(), broken, broken.double()):
            expected = tensor.clone()
            dist.all_reduce(expected)
            before = communicator.counters()["sent_bytes"]
            sparsecomm.allreduce(tensor, INA, communicator=communicator)
            torch.testing.assert_close(tensor, expected)  # of integers, equal
            if size > 1:  # each element was sent once, and no aggregator has been given up
                sent = communicator.counters()["sent_bytes"] - before
                assert tensor.nbytes < sent < 1.05 * tensor.nbytes
                assert not communicator.lost_aggregators()
        collectives._of_group.pop(group)


@pytest.mark.parametrize(
    ("size", "count", "transport"),
    [(1, 1, "auto"), (2, 1, "tcp"), (3, 2, "auto"), (2, 2, "tcp")],
)
def test_reduces_every_type_and_op(size: int, count: int, transport: str) -> None:
    with aggregators(count) as addresses:
        run_ranks(size, _reduce, size, addresses, transport, timeout=120)


def _train(addresses: tuple[str, ...]) -> None:
    state = sparsecomm.CompressionState(
        Compression(density=1.0, algorithm=INA), aggregators=addresses, timeout=LONG_TIME
    )
    plain, through = make_ddp(make_model()), make_ddp(make_model())
    sparsecomm.register_comm_hook(through, state)
    for ddp in (plain, through):
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(3))
    torch.testing.assert_close(flat(through.parameters()), flat(plain.parameters()))


def test_a_state_of_ddp_trains_through_them() -> None:
    with aggregators(2) as addresses:
        run_ranks(2, _train, addresses)


def _train_blocks(addresses: tuple[str, ...], dtype: torch.dtype) -> None:
    """With and without aggregators the same bits, of two ranks; and a checkpoint serves both."""

    def step(ddp: Any, steps: range) -> None:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), steps)

    models, states = [], []
    for given in ((), addresses):
        state = sparsecomm.BlockTopkState(
            0.1, block=16, momentum=0.5, aggregators=given, timeout=LONG_TIME
        )
        assert state.algorithm == ("ina_sparse" if given else "topk_dsa")
        models.append(make_ddp(make_model(dtype=dtype)))
        states.append(sparsecomm.register_comm_hook(models[-1], state))
        step(models[-1], range(3))
    saved = [state.state_dict() for state in states]
    assert torch.equal(flat(models[0].parameters()), flat(models[1].parameters()))
    for state, other in zip(states, reversed(saved), strict=True):
        state.load_state_dict(other)
    for ddp in models:
        step(ddp, range(3, 6))
    assert torch.equal(flat(models[0].parameters()), flat(models[1].parameters()))
    through = states[1].stats()
    assert through["lost_aggregators"] == {}
    assert 0.05 < through["realised_density"] < 0.5
    assert through["realised_density"] <= through["result_density"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_blocks_of_the_largest_norms_train_through_them(dtype: torch.dtype) -> None:
    with aggregators(2) as addresses:
        run_ranks(2, _train_blocks, addresses, dtype)


def _lose(address: str, process: int) -> None:
    state = sparsecomm.BlockTopkState(0.1, block=16, aggregators=(address,), timeout=LONG_TIME)
    plain = sparsecomm.BlockTopkState(0.1, block=16)
    models = [make_ddp(make_model()) for _ in range(2)]
    for ddp, of_it in zip(models, (state, plain), strict=True):
        sparsecomm.register_comm_hook(ddp, of_it)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(2))
    if dist.get_rank() == 0:
        os.kill(process, signal.SIGKILL)
    dist.barrier()
    for ddp in models:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(2, 4))
    assert torch.equal(flat(models[0].parameters()), flat(models[1].parameters()))
    assert [*state.stats()["lost_aggregators"]] == [address]


def test_blocks_are_summed_by_the_ranks_once_aggregators_are_lost() -> None:
    with aggregator() as (process, address):
        run_ranks(2, _lose, address, process.pid)


def _come_back(address: str, process: int, automatic: bool) -> None:
    with connected((address,)) as communicator, ExitStack() as stack:
        algorithm = "auto" if automatic else INA

        def reduce(times: int = 1) -> None:
            for _ in range(times):
                tensor = own_tensor()
                sparsecomm.allreduce(tensor, algorithm, communicator=communicator)
                assert (tensor == total_of_ranks()).all()

        reduce()
        if dist.get_rank() == 0:
            os.kill(process, signal.SIGKILL)
            wait_until(lambda: not listens(address))
        dist.barrier()
        sparsecomm.allreduce(own_tensor(), INA, communicator=communicator)
        assert [*communicator.lost_aggregators()] == [address]
        if dist.get_rank() == 0:
            stack.enter_context(aggregator(listen=address))
        dist.barrier()
        reduce(70)
        assert communicator.lost_aggregators() == {}
        sent = communicator.counters()["sent_bytes"]
        sparsecomm.allreduce(own_tensor(), INA, communicator=communicator)
        assert communicator.counters()["sent_bytes"] > sent
        dist.barrier()


def listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("automatic", [False, True])
def test_an_aggregator_that_was_lost_is_used_again_once_it_is_back(automatic: bool) -> None:
    with aggregator() as (process, address):
        run_ranks(2, _come_back, address, process.pid, automatic)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("host:7000", TypeError, "give a sequence"),
        (7000, TypeError, "not a sequence of addresses, HOST:PORT"),
        ((7000,), TypeError, "not a sequence of addresses, HOST:PORT"),
        (("host",), ValueError, 'address is "host", must be HOST:PORT'),
        (("host:70000",), ValueError, "host:70000"),
        ((":7000",), ValueError, "must name a host and a port"),
        (("host:0",), ValueError, "must name a host and a port"),
        (("one:7000", "two:7000", "one:7000"), ValueError, "one:7000 of an aggregator is given tw"),
    ],
)
def test_bad_lists_are_refused_at_once(given: Any, error: type[Exception], text: str) -> None:
    for make in (CommunicatorOptions, sparsecomm.Options, sparsecomm.DenseOverlapState):
        with pytest.raises(error, match=text):
            make(aggregators=given)


def test_states_that_would_not_use_them_refuse_them() -> None:
    given = ("one:7000",)
    for name in ("dense", "dense_overlap", "topk_a", "oktopk"):
        compression = Compression(density=1.0, algorithm=name)
        with pytest.raises(ValueError, match=f"algorithm='{name}' uses no aggregators"):
            sparsecomm.CompressionState(compression, aggregators=given)
    for name in (INA, "ina_sparse", "auto"):
        compression = Compression(density=1.0, algorithm=name)
        assert sparsecomm.CompressionState(compression, aggregators=given).algorithm == name


def test_the_transport_to_them_is_one_of_three() -> None:
    with pytest.raises(ValueError, match='aggregator_transport is "udp", must be auto, tcp or ucx'):
        CommunicatorOptions(aggregator_transport="udp")


def test_options_keep_a_list_as_a_tuple() -> None:
    options = CommunicatorOptions(aggregators=["one:7000", "[::1]:7000"])
    assert options.aggregators == ("one:7000", "[::1]:7000")
    assert hash(options) == hash(CommunicatorOptions(aggregators=options.aggregators))


def _missing() -> None:
    with Communicator.from_process_group() as communicator:
        assert communicator.engine.services().count("aggregators") == 0
        assert "give it the addresses of some" in communicator.engine.missing(INA)
        with pytest.raises(RuntimeError, match="it needs aggregators and has none"):
            sparsecomm.allreduce(torch.ones(10), INA, communicator=communicator)
        assert sparsecomm.allreduce(torch.ones(10), communicator=communicator)[0] == 2


def test_without_addresses_all_ranks_say_what_to_do_and_go_on() -> None:
    run_ranks(2, _missing)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def _unreachable(address: str, there: str) -> str:
    tensor = own_tensor()
    with connected((there, address)) as communicator:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="the aggregators cannot be used") as raised:
            sparsecomm.allreduce(tensor, communicator=communicator)
        assert time.monotonic() - start < LONG / 2
        assert torch.equal(tensor, own_tensor())
        # Who starts what is missing goes on with the same communicator.
        dist.barrier()
        if dist.get_rank() == 0:
            with aggregator(listen=address):
                dist.barrier()
                sparsecomm.allreduce(tensor, INA, communicator=communicator)
                dist.barrier()
        else:
            dist.barrier()
            sparsecomm.allreduce(tensor, INA, communicator=communicator)
            dist.barrier()
    assert (tensor == total_of_ranks()).all()
    return str(raised.value)


def test_an_address_that_is_not_reached_is_named_on_all_ranks_which_may_try_again() -> None:
    address = free_address()
    with aggregators(1) as (there,):
        said = run_ranks(3, _unreachable, address, there)
    assert said == [said[0]] * 3
    assert "rank 0: cannot connect to " + address in said[0]


def _disagree(lists: list[tuple[str, ...]]) -> str:
    tensor = own_tensor()
    with (
        connected(lists[dist.get_rank()]) as communicator,
        pytest.raises(RuntimeError, match="ranks disagree") as raised,
    ):
        sparsecomm.allreduce(tensor, communicator=communicator)
    assert torch.equal(tensor, own_tensor())
    return str(raised.value)


@pytest.mark.parametrize("others", ["the same in another order", "one", "none"])
def test_ranks_with_different_lists_all_name_them(others: str) -> None:
    with aggregators(2) as (one, two):
        first = (one, two)
        second = {"one": (one,), "none": ()}.get(others, (two, one))
        said = run_ranks(2, _disagree, [first, second])
    assert said[0] == said[1]
    assert "aggregators: " in said[0]
    for rank, addresses in enumerate((first, second)):
        assert f"{', '.join(addresses) or 'nothing'} on rank {rank}" in said[0]


def _as_backend(addresses: tuple[str, ...]) -> str:
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "sparsecomm",
        store=dist.PrefixStore("again", store),
        rank=rank,
        world_size=size,
        pg_options=sparsecomm.Options(aggregators=addresses),
    )
    sparse = own_tensor().to_sparse()
    try:
        dist.all_reduce(sparse)
    except RuntimeError as error:
        return str(error)
    assert (sparse.to_dense() == total_of_ranks()).all()
    return ""


@pytest.mark.parametrize("reached", [True, False])
def test_the_backend_joins_them_in_its_first_operation(reached: bool) -> None:
    with aggregators(1) as (there,):
        address = there if reached else free_address()
        said = run_ranks(2, _as_backend, (address,))
    assert said[0] == said[1]
    assert reached == (said[0] == "")
    assert reached or address in said[0]


def _end(how: str, address: str) -> None:
    communicator = connected((address,))
    expected: type[BaseException] = RuntimeError
    start = time.monotonic()
    if dist.get_rank() == 0:
        if how == "close":
            threading.Timer(0.5, communicator.close).start()
        else:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            expected = KeyboardInterrupt
    with pytest.raises(expected):
        sparsecomm.allreduce(own_tensor(), communicator=communicator)
    assert time.monotonic() - start < LONG / 4
    communicator.close()


@pytest.mark.parametrize("how", ["close", "Ctrl-C"])
def test_what_ends_the_wait_for_one_that_does_not_answer(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run_ranks(2, _end, how, f"127.0.0.1:{silent.getsockname()[1]}")


def _odd_input(addresses: tuple[str, ...]) -> str:
    total = total_of_ranks()
    with connected(addresses) as communicator:
        for tensor in (
            torch.empty(0),
            torch.empty(3, 0),
            torch.ones(40, 50).t(),
            torch.ones(100, 4)[:, 1],
            torch.ones(10, dtype=torch.int32).expand(1, 10),
        ):
            tensor.mul_(dist.get_rank() + 1)
            sparsecomm.allreduce(tensor, INA, communicator=communicator)
            assert (tensor == total).all()
        with pytest.raises(RuntimeError, match="ranks disagree") as raised:
            sparsecomm.allreduce(torch.ones(10 + dist.get_rank()), INA, communicator=communicator)
        tensor = own_tensor()
        sparsecomm.allreduce(tensor, INA, communicator=communicator)
        assert (tensor == total).all()
        assert not communicator.lost_aggregators()
    return str(raised.value)


def test_sizes_that_differ_are_named_and_any_strides_reduced() -> None:
    with aggregators(1) as addresses:
        said = run_ranks(2, _odd_input, addresses)
    assert said[0] == said[1]
    assert "10 on rank 0 but 11 on rank 1" in said[0]


def _not_admitted(addresses: tuple[str, ...]) -> str:
    tensor = own_tensor()
    with connected(addresses) as communicator:
        with pytest.raises(RuntimeError) as raised:
            sparsecomm.allreduce(tensor, INA, communicator=communicator)
        assert torch.equal(tensor, own_tensor())
    return str(raised.value)


def test_ranks_that_an_aggregator_has_no_memory_for_are_told_both_numbers() -> None:
    with aggregator("--memory", "50000") as (_, address):
        said = run_ranks(3, _not_admitted, (address,))
    # (n + 2) (b d + 4 d + 64), of one of the streams
    wanted = (3 + 2) * (1024 * 16 + 4 * 16 + 64)
    for text in said:
        assert str(wanted) in text
        assert "50000" in text


def _other_version(address: str) -> str:
    with (
        connected((address,)) as communicator,
        pytest.raises(RuntimeError, match="the aggregators cannot be used") as raised,
    ):
        sparsecomm.allreduce(own_tensor(), INA, communicator=communicator)
    return str(raised.value)


def test_an_aggregator_of_another_version_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        magic, version = 0x494E4153, 999

        def answer() -> None:
            for _ in range(2):
                connection = listener.accept()[0]
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(struct.pack("<IHHHHHHQ", magic, version, 0, 0, 0, 0, 0, 0))

        thread = threading.Thread(target=answer)
        thread.start()
        said = run_ranks(2, _other_version, address)
        thread.join()
    assert said == [said[0]] * 2
    assert address in said[0]
    assert str(version) in said[0]


@pytest.mark.parametrize("size", [0, 32, 1000, 1 << 17])
def test_blocks_are_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=f"block_bytes = {size} is not a power of two from 64"):
        exchange_options(INA, 1.0, block_bytes=size)


def _with_token(address: str, files: list[str]) -> str:
    tensor = own_tensor()
    with connected((address,), aggregator_token_file=files[dist.get_rank()]) as communicator:
        try:
            sparsecomm.allreduce(tensor, INA, communicator=communicator)
        except RuntimeError as error:
            return str(error)
    assert (tensor == total_of_ranks()).all()
    return ""


def test_ranks_show_the_token_that_aggregators_ask_for(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name} {name * 8}\n")
    (tmp_path / "all").write_text("".join((tmp_path / n).read_text() for n in ("one", "two")))
    (tmp_path / "wrong").write_text("# of nobody\nwrong " + "x" * 30)
    with aggregator("--tokens", str(tmp_path / "all")) as (_, address):

        def said(*names: str) -> list[str]:
            return run_ranks(2, _with_token, address, [str(tmp_path / name) for name in names])

        assert said("one", "one") == ["", ""]
        for names, reason in ((("one", "wrong"), "token"), (("one", "two"), "another token")):
            refused = said(*names)
            assert refused[0] == refused[1]
            assert reason in refused[0]
        os.environ["SPARSECOMM_AGGREGATOR_TOKEN_FILE"] = str(tmp_path / "two")
        try:
            assert run_ranks(2, _through_environment, address) == ["", ""]
        finally:
            del os.environ["SPARSECOMM_AGGREGATOR_TOKEN_FILE"]
        assert "asks for a token" in run_ranks(2, _through_environment, address)[0]


def _through_environment(address: str) -> str:
    try:
        with connected((address,)) as communicator:
            sparsecomm.allreduce(own_tensor(), INA, communicator=communicator)
    except RuntimeError as error:
        return str(error)
    return ""


def test_files_without_a_token_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        CommunicatorOptions(aggregator_token_file=str(tmp_path / "nowhere"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ValueError, match="no token in it"):
        CommunicatorOptions(aggregator_token_file=str(tmp_path / "empty"))
