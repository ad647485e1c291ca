"""Which nodes there are, their process sets, and what stands against a hierarchical exchange."""

import pytest

from horovod_gradcomp.core.errors import SettingsError
from horovod_gradcomp.core.exchange import Scope
from horovod_gradcomp.torch import node_process_sets, nodes

pytestmark = pytest.mark.distributed  # needs Horovod, and starts nothing


def ranks(sets):
    return [one.ranks for one in sets]


def test_process_sets_for_init(monkeypatch):
    assert ranks(node_process_sets(2, 4)) == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert ranks(node_process_sets(3, 6))[2:] == [[0, 3], [1, 4], [2, 5]]
    for per_node, size in ((4, 4), (1, 4), (3, 4), (8, 4), (1, 1)):
        assert node_process_sets(per_node, size) == [], (per_node, size)
    for variable in (*nodes._SIZES, *nodes._LOCAL_SIZES):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SettingsError, match="none of HOROVOD_SIZE, OMPI_COMM_WORLD_SIZE"):
        node_process_sets(2)
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    with pytest.raises(SettingsError, match="ranks_per_node"):
        node_process_sets()
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert ranks(node_process_sets()) == ranks(node_process_sets(2, 4))
    with pytest.raises(SettingsError, match="ranks_per_node=0"):
        node_process_sets(0)


class Whole:
    process_set_id, ranks = 0, [0, 1, 2, 3]


def places(hosts, **changed):
    plain = {"dynamic": False, "elastic": False, "joins": False}
    out = [{**plain, "node": host} for host in hosts]
    out[-1].update(changed)
    return out


def find(told, *, forced=True, per_node=None, process_set=Whole, wanted=True):
    return nodes.find(
        told,
        forced=forced,
        ranks_per_node=per_node,
        process_set=process_set,
        wanted=lambda found: wanted,
    )


@pytest.fixture
def horovod(monkeypatch):
    """Rank 2 of Horovod with the process sets in the list; others are added to it."""
    known = {}
    monkeypatch.setattr(nodes, "_known", lambda: dict(known))
    monkeypatch.setattr(nodes.hvd, "rank", lambda: 2)
    monkeypatch.setattr(
        nodes.hvd, "add_process_set", lambda some: known.setdefault(tuple(some), f"made {some}")
    )
    return known


PAIRS = [0, 0, 1, 1]


def test_given_sets_are_found(horovod):
    horovod.update({pair: str(pair) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))})
    found = find(places(PAIRS))
    assert found.nodes.members == ((0, 1), (2, 3))
    assert found.sets == {Scope.NODE: "(2, 3)", Scope.COLUMN: "(0, 2)"}
    assert find(places([0, 0, 0, 0]), per_node=2) == found


def test_missing_sets_are_made_by_all_alike(horovod):
    horovod[0, 1] = "given"
    told = [{**one, "dynamic": True} for one in places(PAIRS)]
    assert find(told).sets == {Scope.NODE: "made [2, 3]", Scope.COLUMN: "made [0, 2]"}
    assert list(horovod) == [(0, 1), (2, 3), (0, 2), (1, 3)]


def test_a_set_is_made_only_where_it_is_used(horovod):
    told = [{**one, "dynamic": True} for one in places(PAIRS)]
    assert find(told, forced=False, wanted=False) is None
    assert not horovod
    assert find(told, forced=False) is not None


class Some:
    process_set_id, ranks = 3, [0, 1]


@pytest.mark.parametrize(
    ("told", "more", "message"),
    [
        (places(PAIRS), {}, r"process set of ranks \[0, 1\] and 3 more.*node_process_sets\(\)"),
        (places(PAIRS), {"per_node": 2}, r"node_process_sets\(2\)"),
        (places(PAIRS, dynamic=True), {}, "DYNAMIC_PROCESS_SETS"),  # on one rank only
        (places([0, 0, 0, 1]), {}, "3, 1 ranks on 2.*equal sizes"),
        (places([0, 1, 2, 3]), {}, "1, 1, 1, 1 ranks on 4.*several nodes of several"),
        (places([0] * 6), {}, "6 ranks on 1 node"),
        (places([*range(6)]), {}, r"1, 1, 1, 1, \.\.\. ranks on 6"),
        (places(PAIRS, elastic=True), {}, "elastic"),
        (places(PAIRS), {"process_set": Some}, r"process set of ranks \[0, 1\]"),
    ],
)
def test_what_stands_against_it(horovod, told, more, message):
    with pytest.raises(SettingsError, match=message):
        find(told, **more)
    assert find(told, **more, forced=False) is None


def test_ranks_that_join_are_left_alone_unless_told(horovod):
    told = [{**one, "dynamic": True} for one in places(PAIRS, joins=True)]
    assert find(told, forced=False) is None
    assert find(told) is not None
