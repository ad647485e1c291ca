"""``gradcomp advise``: units, measured costs, and the answer."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from horovod_gradcomp.cli import advice, costs, plots, units
from horovod_gradcomp.cli.bench import FORMS
from horovod_gradcomp.core.codec import Combine
from horovod_gradcomp.core.errors import GradCompError, SettingsError
from horovod_gradcomp.core.links import Cluster, Link

MBIT = 1e6 / 8


def gradcomp(*args):
    command = [sys.executable, "-m", "horovod_gradcomp", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# Units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.count, "100e6", 100_000_000),
        (units.count, "25_000_000", 25_000_000),
        (units.count, "25,000,000", 25_000_000),
        (units.count, "100M", 100_000_000),
        (units.count, "1.5B", 1_500_000_000),
        (units.count, " 7 k ", 7000),
        (units.bandwidth, "10gbit", 1.25e9),
        (units.bandwidth, "100mbit", 1.25e7),
        (units.bandwidth, "100 Mbit/s", 1.25e7),
        (units.bandwidth, "10Gb/s", 1.25e9),
        (units.bandwidth, "10Gbps", 1.25e9),
        (units.bandwidth, "1.25GB/s", 1.25e9),
        (units.bandwidth, "1MiB/s", 2**20),
        (units.bandwidth, "8 bit", 1.0),
        (units.bandwidth, "3 bytes/s", 3.0),
        (units.duration, "50us", 50e-6),
        (units.duration, "50µs", 50e-6),
        (units.duration, ".2 ms", 0.2e-3),
        (units.duration, "0", 0.0),
        (units.shape, "1024x512", (1024, 512)),
        (units.shape, "64x3x3x3", (64, 3, 3, 3)),
    ],
)
def test_units(read, text, value):
    assert read(text, "--option") == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((units.count, text) for text in ("", "many", "0", "-3", "0.2", "1e999", "3 apples")),
        *((units.bandwidth, text) for text in ("10", "0gbit", "gbit", "10gb its", "10s", "1e9")),
        *((units.duration, text) for text in ("5", "5 m", "ms", "-1ms")),
        *((units.shape, text) for text in ("", "3x", "0x4", "axb")),
    ],
)
def test_bad_units_say_which_option(read, text):
    with pytest.raises(SettingsError, match=f"got --option {text!r}.* such as "):
        read(text, "--option")


def test_sizes_are_shown_in_three_digits():
    assert units.show_bytes(400e6) == "400 MB"
    assert units.show_bytes(4e10) == "40 GB"
    assert units.show_bytes(999.9e6) == "1 GB"
    assert units.show_bytes(12) == "12 B"
    assert units.show_rate(1.25e9) == "10 Gbit/s"


# Costs ----------------------------------------------------------------------------------------

ROW = {
    "codec": "topk",
    "framework": "torch",
    "device": "cpu",
    "numel": 25_000_000,
    "threads": 1,
    "ranks": 1,
    "encode_x": 4.0,
    "decode_x": 2.0,
    "rel_error": 0.5,
    "copy_ms": 20.0,
}


def test_a_further_payload_costs_what_more_ranks_cost():
    rows = [{**ROW, "ranks": 9, "decode_x": 6.0, "encode_x": 9.0}, ROW]
    found = costs.Costs(rows, {}).of("topk", "torch", "cpu")
    assert (found.encode, found.decode, found.decode_more) == (4.0, 2.0, 0.5)
    assert found.error == 0.5
    assert found.copy == pytest.approx(1e8 / 0.02)
    speed = found.speed(1000.0)
    assert (speed.encode, speed.decode, speed.decode_more) == (250.0, 500.0, 2000.0)


def test_a_step_looks_twice_whether_all_is_finite():
    found = costs.Costs([{**ROW, "check_x": 0.5}], {}).of("topk", "torch", "cpu")
    assert (found.encode, found.decode, found.decode_more) == (4.5, 2.5, 2.0)


def test_one_number_of_ranks_gives_an_upper_bound():
    found = costs.Costs([{**ROW, "ranks": 4}], {}).of("topk", "torch", "cpu")
    assert (found.decode, found.decode_more) == (0.5, 0.5)


def test_what_takes_part_in_encoding_is_not_counted_twice():
    found = costs.Costs([{**ROW, "decode_x": None}], {}).of("topk", "torch", "cpu")
    assert found.speed(1000.0).decoding(1e9, payloads=3) == 0


def test_noise_never_gives_a_negative_cost():
    rows = [ROW, {**ROW, "ranks": 9, "decode_x": 1.0}]
    found = costs.Costs(rows, {}).of("topk", "torch", "cpu")
    assert (found.decode, found.decode_more) == (2.0, 0.0)
    assert found.speed(1.0).decode_more == math.inf


def test_what_was_not_measured_is_not_known():
    table = costs.Costs([ROW], {})
    assert table.of("topk", "torch", "cuda") is None
    assert table.of("topk", "tensorflow", "cpu") is None
    assert table.of("linear", "torch", "cpu") is None


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_codec_is_in_the_package(framework):
    table = costs.load()
    assert {"machine", "date", "command"} <= table.about.keys()
    for form in FORMS:
        found = table.of(form, framework, "cpu")
        assert found, form
        assert found.encode > 0
        assert 0 <= found.decode_more <= 20


def test_rows_are_gathered_with_machine_and_day(tmp_path):
    for name, ranks in (("a", 1), ("b", 9)):
        rows = [{**ROW, "ranks": ranks, "spread": 1.0, "encode_x": 1 / 3, "check_x": 0.5}]
        (tmp_path / name).write_text(json.dumps(rows))
    out = tmp_path / "costs.json"
    files = [str(tmp_path / name) for name in ("a", "b")]
    done = gradcomp("bench", "costs", *files, "--output", str(out))
    assert done.returncode == 0, done.stderr
    table = costs.load(out)
    assert [row["ranks"] for row in table.rows] == [1, 9]
    assert table.rows[0] == {**ROW, "encode_x": 0.3333, "check_x": 0.5}
    assert table.about["machine"] == costs.machine()
    assert table.about["date"].count("-") == 2


@pytest.mark.parametrize("text", ["", "[1]", '[{"codec": "topk"}]', '{"rows": 3}', "3"])
def test_other_files_are_refused(text, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"rows\.json"):
        costs.load(file)
    with pytest.raises(SettingsError, match="No such file"):
        costs.load(tmp_path / "none")


def test_the_copy_copies():
    assert 1e8 < costs.copy_speed(3) < 2e11  # bytes a second


# The answer -----------------------------------------------------------------------------------


def question(mbit=1000.0, ranks=2, per_host=1, **more):
    between, inside = Link(mbit * MBIT, 50e-6), Link(1.25e10, 1e-5)
    cluster = Cluster(ranks=ranks, per_host=per_host, between=between, inside=inside)
    return advice.Question(**{"params": 25_000_000, "cluster": cluster, "copy": 6e9, **more})


def rated(forms, errors, encode=3.0):
    rows = [
        {**ROW, "codec": form, "rel_error": error, "encode_x": encode, "decode_x": 1.0}
        for form, error in zip(forms, errors)
    ]
    return costs.Costs(rows, {"file": "x"})


def ask(of, forms=FORMS, table=None):
    return advice.advise(of, advice.candidates(of, forms, table or costs.load()))


def test_a_slow_link_is_worth_compressing_for():
    answer = ask(question(mbit=100))
    assert answer.chosen
    assert answer.chosen.speedup > 4
    assert answer.rows == sorted(answer.rows, key=lambda row: row.cost.step)
    assert f"With {answer.chosen.codec} over {answer.chosen.cost.exchange}" in answer.reason


@pytest.mark.parametrize(
    ("why", "of"),
    [
        ("the link is fast", question(mbit=400_000)),
        ("computing hides the exchange", question(mbit=10_000, compute=10.0)),
        ("the processor is slow", question(mbit=10_000, copy=1e8)),
    ],
)
def test_do_not_compress(why, of):
    answer = ask(of)
    assert answer.chosen is None, why
    assert answer.reason.startswith("Do not compress. Uncompressed, a step takes")
    assert answer.rows[0].speedup < advice.WORTH_IT


def test_among_those_alike_the_mildest_is_chosen():
    forms = ["topk", "topk:ratio=0.001", "linear:bits=2"]
    table = rated(forms, [0.6, 0.9, 0.1], encode=0.1)
    answer = ask(question(mbit=10), forms, table)
    assert answer.rows[0].codec == "topk:ratio=0.001"
    assert answer.chosen.codec == "topk:ratio=0.001"  # the others send ten times as much
    assert " Nothing is faster." in answer.reason
    forms = ["topk", "randomk"]
    answer = ask(question(mbit=1000), forms, rated(forms, [0.9, 0.1], encode=50.0))
    assert answer.rows[0].speedup < 1
    forms = ["topk", "fp16"]
    answer = ask(question(mbit=100), forms, rated(forms, [0.9, 0.1], encode=0.1))
    assert answer.chosen.codec == "topk"
    assert "The mildest that still pays is fp16 over allreduce: " in answer.reason
    quick = rated(["topk:ratio=0.01", "topk:ratio=0.0099"], [0.5, 0.6], encode=0.1)
    answer = ask(question(mbit=100), ["topk:ratio=0.01", "topk:ratio=0.0099"], quick)
    assert answer.rows[0].codec == "topk:ratio=0.0099"
    assert answer.chosen.codec == "topk:ratio=0.01"
    assert "leaves out least: 50 %" in answer.reason


def test_the_limit_is_where_it_stops_to_pay():
    answer = ask(question(mbit=100, compute=0.2))
    assert 100 * MBIT < answer.pays_below < 1e6 * MBIT
    at = question(compute=0.2).at
    assert ask(at(answer.pays_below / 1.05)).chosen
    assert ask(at(answer.pays_below * 1.05)).chosen is None


def test_unmeasured_codecs_are_never_chosen_but_may_be_ruled_out():
    slow = question(mbit=100, device="cuda", copy=None)
    answer = ask(slow)
    assert answer.chosen is None
    assert answer.reason.startswith("It cannot be told")
    assert "bench codecs --framework torch --device cuda --json FILE" in answer.reason
    assert not any(row.measured for row in answer.rows)
    fast = ask(replace(slow, compute=1000.0))
    assert fast.reason.startswith("Do not compress.")
    assert "even if encoding cost nothing" in fast.reason
    table = costs.Costs([{**ROW, "device": "cuda"}], {})
    known = ask(slow, ["topk"], table)
    assert known.chosen.codec == "topk"
    assert known.rows[0].cost.encode == pytest.approx(4 * 0.02)  # its own copies


def test_one_worker_reduces_nothing():
    answer = ask(question(ranks=1))
    assert answer.chosen is None
    assert "One worker" in answer.reason


def test_payloads_are_those_that_codecs_declare():
    of = question(params=3_000_000)
    ((shapes, times),) = of.parts
    assert shapes == [(1024, 1024)] * 2 + [(3_000_000 - 2 * 2**20,)]
    assert times == 1
    (found,) = advice.candidates(of, ["none", "powersgd"], costs.load())
    assert found.settings.codec.combine is Combine.ROUNDS
    assert found.payload == found.settings.codec.wire_bytes(*shapes)
    assert found.rounds == 2


def test_many_layers_send_so_many_times_what_some_do():
    few, many = (question(params=n * 64 * 64 + 5, layer=(64, 64)) for n in (1024, 10_240))
    payloads = [advice.candidates(of, ["topk"], costs.load())[0].payload for of in (few, many)]
    assert payloads[1] == pytest.approx(10 * payloads[0], rel=1e-3)
    assert [times for _, times in many.parts] == [10, 1]


def test_real_shapes():
    of = question(params=7, tensors=((100, 100), (100,)))
    (found,) = advice.candidates(of, ["powersgd"], costs.load())
    assert found.payload == found.settings.codec.wire_bytes((100, 100), (100,))


def test_what_does_not_pay_by_itself_is_never_chosen():
    forms = ["topk:ratio=0.001", "linear"]
    table = costs.Costs(
        [
            {**ROW, "codec": forms[0], "rel_error": 0.9, "encode_x": 0.1, "decode_x": 0.1},
            {**ROW, "codec": forms[1], "rel_error": 0.1, "encode_x": 0.5, "decode_x": 0.3},
        ],
        {"file": "x"},
    )
    among = advice.candidates(question(), forms, table)
    steps = [
        (mbit, advice.rows(question(mbit, compute=0.3), among)) for mbit in range(500, 9000, 50)
    ]
    mbit = next(
        mbit
        for mbit, (best, other) in steps
        if best.speedup > advice.WORTH_IT > other.speedup
        and other.cost.step < advice.ALIKE * best.cost.step
    )
    answer = ask(question(mbit, compute=0.3), forms, table)
    assert answer.chosen.codec == forms[0]
    assert "The mildest" not in answer.reason


def test_of_errors_that_look_alike_the_shorter_step_is_chosen():
    forms = ["topk:ratio=0.01", "topk:ratio=0.0099"]
    answer = ask(question(mbit=100), forms, rated(forms, [0.6020, 0.6023], encode=0.1))
    assert answer.chosen is answer.rows[0]


def test_computing_above_which_nothing_pays():
    of = question(mbit=1000)
    among = advice.candidates(of, FORMS, costs.load())
    limit = advice.pays_until(of, among)
    assert ask(replace(of, compute=limit / 1.05)).chosen
    assert ask(replace(of, compute=limit * 1.05)).chosen is None
    assert advice.pays_until(question(mbit=400_000), among) is None


def test_exchanges_that_a_codec_or_a_framework_lacks_are_left_out():
    of = question(mbit=100, ranks=64, per_host=8)
    forms = ["linear", "topk", "cltk", "dgc", "svd"]
    made = {one.form: one.settings for one in advice.candidates(of, forms, costs.load())}
    all_three = ("allgather", "two_phase", "hierarchical")
    assert advice.allowed(of, made["linear"]) == advice.allowed(of, made["topk"]) == all_three
    assert advice.allowed(of, made["cltk"]) == ("allreduce",)
    assert advice.allowed(of, made["dgc"]) == all_three[:2]  # momentum, and few values
    assert advice.allowed(of, made["svd"]) == all_three[:1]  # it sees a matrix as a whole
    tensorflow = replace(of, framework="tensorflow")
    assert advice.allowed(tensorflow, made["linear"]) == all_three[:1]
    found = {row.codec: row.cost.exchange for row in ask(tensorflow).rows}
    assert {*found.values()} == {"allreduce", "allgather"}
    forced = ask(replace(of, exchange="two_phase"), ["svd", "linear"])
    assert {row.codec: row.cost.exchange for row in forced.rows} == {
        "svd": "allgather",
        "linear": "two_phase",
    }


def test_an_exchange_can_be_demanded():
    of = question(mbit=100, ranks=64)
    best = {row.codec: row.cost.exchange for row in ask(of).rows}
    assert best["linear"] == "two_phase"
    forced = {row.codec: row.cost.exchange for row in ask(replace(of, exchange="allgather")).rows}
    assert forced["linear"] == "allgather"
    assert forced["fp16"] == "allreduce"


# The command ----------------------------------------------------------------------------------

FIXED = ("--params", "100e6", "--workers", "100", "--memcpy", "6GB/s")


def test_the_command(tmp_path: Path):
    report, picture = tmp_path / "advice.json", tmp_path / "advice.png"
    done = gradcomp(
        *("advise", *FIXED, "--bandwidth", "1gbit", "--per-node", "8", "--compute-ms", "120"),
        *("--json", str(report), "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "100 workers on 13 hosts, 1 Gbit/s: a step makes 400 MB" in text
    assert "40 GB in all. A ring moves 792 MB over each link." in text
    content = json.loads(report.read_text())
    assert content["volume"]["bytes_in_all"] == 40_000_000_000
    assert content["uncompressed"]["step_ms"] > 6000  # 792 MB at 125 MB/s
    assert {row["codec"] for row in content["rows"]} == set(FORMS) - {"none"}
    assert content["advice"]["compress"] is True
    assert content["advice"]["reason"] in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_is_whole_in_80_columns():
    done = gradcomp("advise", *FIXED, "--bandwidth", "1gbit")
    lines = done.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("codec"))
    table = lines[first : first + len(FORMS) + 3]
    assert max(map(len, table)) <= 80
    assert {form for form in FORMS if form != "none"} <= {
        line.split()[0] for line in table if line.strip()
    }


def test_the_command_says_what_to_write_and_to_heed():
    many = ("advise", "--model", "bert-base", "--workers", "16", "--memcpy", "6GB/s")
    done = gradcomp(*many, "--bandwidth", "1gbit", "--per-node", "8", "--codec", "sign")
    assert done.returncode == 0, done.stderr
    assert "109,482,240 parameters" in done.stdout
    assert 'Compression.from_string("sign", exchange="hierarchical")' in done.stdout
    assert "node_process_sets" in done.stdout
    assert "start_after=" in done.stdout
    assert "On these links nothing pays above about" in done.stdout
    done = gradcomp(*many, "--bandwidth", "1gbit", "--codec", "fp16", "--layer", "10")
    assert 'Compression.from_string("fp16").' in done.stdout
    assert "start_after=" not in done.stdout


def test_a_model_or_its_size():
    done = gradcomp("advise", "--workers", "2", "--bandwidth", "1gbit")
    assert done.returncode == 2
    assert "neither --params nor --model" in done.stderr


def test_the_command_says_no():
    done = gradcomp("advise", *FIXED, "--bandwidth", "400gbit", "--compute-ms", "120")
    assert done.returncode == 0, done.stderr
    assert "Do not compress." in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bandwidth", "10"), "--bandwidth '10'"),
        (("--bandwidth", "10gbit", "--device", "tpu"), "one of cpu, gpu"),
        (("--bandwidth", "10gbit", "--codec", "tokp"), "did you mean 'topk'"),
        (("--bandwidth", "10gbit", "--exchange", "ring"), "two_phase"),
        (("--bandwidth", "10gbit", "--costs", "/nowhere"), "No such file"),
        (("--bandwidth", "10gbit", "--plot", "/nowhere/x.png", "--codec", "topk"), "/nowhere"),
        (("--bandwidth", "10gbit", "--json", "/nowhere/x", "--codec", "topk"), "/nowhere"),
        (("--bandwidth", "10gbit", "--compute-ms", "inf"), "--compute-ms inf"),
        (("--bandwidth", "10gbit", "--params", "1e30"), "at most 1e15"),
        (("--bandwidth", "10gbit", "--per-node", "101"), "--per-node 101"),
        (("--bandwidth", "10gbit", "--exchange", "hierarchical"), "several hosts"),
        (
            ("--bandwidth", "10gbit", "--exchange", "two_phase", "--framework", "tensorflow"),
            "TensorFlow's only",
        ),
        (("--bandwidth", "10gbit", "--model", "bert-base"), "--params and --model"),
    ],
)
def test_errors_of_use(args, message):
    done = gradcomp("advise", *FIXED, *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_no_matplotlib(monkeypatch, tmp_path):
    of = question()
    among = advice.candidates(of, ["topk"], costs.load())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GradCompError, match=r"horovod_gradcomp\[plot\]"):
        plots.step_over_bandwidth(tmp_path / "x.png", of, among, advice.advise(of, among))
