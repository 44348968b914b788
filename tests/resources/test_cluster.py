from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dovetail.documents.parser import _EXPONENT
from dovetail.errors import ClusterError, DovetailError
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.cluster_spec import NODES_LIMIT
from dovetail.resources.gpu_models import KNOWN_CARDS, look_alike_model
from dovetail.resources.instance_types import INSTANCE_TYPES, instance_table
from dovetail.resources.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 1024**3


def cluster_or_error(read: Callable[[], Cluster]) -> Cluster | DovetailError:
    """Any other exception is not meant to be."""
    try:
        return read()
    except DovetailError as error:
        return error


def problems_of(spec: Any) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        Cluster.parse(spec)
    return caught.value


def problems_in(data: Any) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        Cluster.from_dict(data)
    return caught.value


def problems_of_file(path: Path, text: str | bytes) -> ClusterError:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    return caught.value


def position(text: str, part: str) -> str:
    before = text[: text.index(part)]
    return f"{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"


def one_node(**entry: Any) -> dict[str, Any]:
    return {"nodes": [{"cpus": 4, **entry}]}


# ---- clusters of every kind


def made_up(position: int) -> str:
    return f"node-{position}"


any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6).filter(lambda it: bool(it.strip()))
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,5}", fullmatch=True)
values = st.one_of(
    st.from_regex(r"[A-Za-z0-9_./:-][A-Za-z0-9_./: -]{0,5}", fullmatch=True).map(str.strip),
    st.sampled_from(["yes", "null", "1", "0x10", "1.0", "2024-01-01", "true"]),
)
# a card called "...cpu" would read as a number of CPUs
models = st.one_of(
    st.sampled_from([*KNOWN_CARDS, "gpu", "NVIDIA A100-SXM4-80GB", "nvidia geforce rtx 4090", "MI300X", "x100"]),
    st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,6}", fullmatch=True).filter(
        lambda it: not re.search("(?i)cpus?$", it) and look_alike_model(it) is None
    ),
)
memories = st.one_of(st.just(0), st.integers(1, 2**53), st.integers(1, 2**20).map(lambda number: number << 30))
cards = st.builds(
    lambda model, memory, nvdecs, nvencs: Gpu.of(model, None if memory is None else f"{memory}B", nvdecs, nvencs),
    models,
    st.one_of(st.none(), memories),
    st.one_of(st.none(), st.integers(0, 1024)),
    st.one_of(st.none(), st.integers(0, 1024)),
)
cpus = st.one_of(st.integers(1, 256).map(lambda number: number * 1000), st.integers(1, 10**9))


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    cpu_milli = draw(cpus)
    return Node(
        name="",
        cpu_milli=cpu_milli,
        memory_bytes=draw(memories),
        gpus=tuple(draw(st.lists(cards, max_size=4))) * draw(st.integers(1, 2)),
        labels=tuple(sorted(draw(st.dictionaries(words, values, max_size=3)).items())),
        custom=tuple(sorted(draw(st.dictionaries(words, st.integers(1, 10**9), max_size=3)).items())),
        kept_back_milli=draw(st.one_of(st.just(0), st.integers(0, cpu_milli - 1))),
    )


@st.composite
def clusters(draw: st.DrawFn, *, named: bool) -> Cluster:
    """`named`: nodes have names, which a file can say and a spec cannot."""
    kinds = draw(st.lists(nodes(), min_size=1, max_size=3))
    found: list[Node] = []
    for kind in kinds:
        for _ in range(draw(st.integers(1, 3))):
            name = draw(st.one_of(st.just(made_up(len(found))), any_text)) if named else made_up(len(found))
            found.append(replace(kind, name=name))
    assume(len({node.name for node in found}) == len(found))
    return Cluster(tuple(found))


@given(clusters(named=False))
@settings(max_examples=2 * settings().max_examples)
def test_a_spec_is_read_back_to_the_same_cluster(cluster: Cluster) -> None:
    assert Cluster.parse(cluster.spec()) == cluster
    assert Cluster.parse(cluster.spec()).spec() == cluster.spec()


@given(clusters(named=True))
@settings(max_examples=2 * settings().max_examples)
def test_plain_data_is_read_back_to_the_same_cluster(cluster: Cluster) -> None:
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


@given(clusters(named=True), st.booleans())
def test_a_yaml_or_json_file_is_read_back_to_the_same_cluster(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, as_json: bool
) -> None:
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    # PyYAML does not quote a text like 0E0, which every reader except YAML 1.1 reads as a number, as ours does
    words = [word for node in cluster.nodes for word in (node.name, *(part for label in node.labels for part in label))]
    assume(not any(_EXPONENT.fullmatch(word) for word in words))
    text = json.dumps(cluster.to_dict(), indent=2) if as_json else yaml.safe_dump(cluster.to_dict())
    path.write_text(text, encoding="utf-8")
    assert Cluster.load(path) == cluster


@pytest.mark.parametrize(
    "entry",
    [
        {"labels": {"pool": "a, b"}},
        {"labels": {"pool": "a}b"}},
        {"labels": {"a=b": "c"}},
        {"labels": {" pool": "a "}},
        {"labels": {"pool": "a + b"}},
        {"labels": {"pool": "("}},
        {"custom": {"a licence": 1}},
        {"custom": {"a=b": 1}},
        {"custom": {"": 1}},
        {"custom": {"2fast": 1}},
        {"gpus": ["NVIDIA A100-SXM4-40GB"]},
        {"gpus": ["1xcpu"]},
    ],
    ids=str,
)
def test_what_a_file_may_say_a_spec_can_say_too(entry: dict[str, Any]) -> None:
    found = cluster_or_error(lambda: Cluster.from_dict(one_node(**entry)))
    if isinstance(found, Cluster):
        assert Cluster.parse(found.spec()) == found
    else:
        assert all(problem.place.startswith("cluster.nodes[0].") for problem in found.problems)


odd_texts = st.text(st.sampled_from([*"abz09 ,;:=+|(){}[]'\"#\\", "\u00e9", "\n", "\u0663"]), max_size=4)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "labels": st.dictionaries(odd_texts, odd_texts, max_size=2),
            "custom": st.dictionaries(odd_texts, st.integers(0, 5), max_size=2),
            "gpus": st.lists(odd_texts, max_size=2),
        },
    )
)
@settings(max_examples=5 * settings().max_examples)
def test_whatever_text_a_file_may_hold_a_spec_can_hold_too(entry: dict[str, Any]) -> None:
    found = cluster_or_error(lambda: Cluster.from_dict(one_node(**entry)))
    if isinstance(found, Cluster):
        assert Cluster.parse(found.spec()) == found
    else:
        assert all(problem.place.startswith("cluster.nodes[0].") for problem in found.problems)


@pytest.mark.parametrize("model", ["A100-1g.10gb+me", "Orin-nvgpu"])
def test_a_card_that_the_driver_names_oddly_survives_being_written_down(model: str) -> None:
    cluster = Cluster((Node("gpu-box", 4000, gpus=(Gpu.of(model, "5GB"),)),))
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_alike_neighbours_are_one_entry_and_names_are_kept() -> None:
    cluster = Cluster.parse("3x(4cpu)")
    assert cluster.to_dict() == {"nodes": [{"count": 3, "cpus": 4}]}
    named = Cluster((cluster.nodes[0], replace(cluster.nodes[1], name="login"), cluster.nodes[2]))
    assert named.to_dict() == {"nodes": [{"cpus": 4}, {"cpus": 4, "name": "login"}, {"cpus": 4}]}
    assert Cluster.from_dict(named.to_dict()) == named


# ---- specs


def test_a_spec_says_what_there_is() -> None:
    cluster = Cluster.parse("2x(32cpu, 128GB, 2xA100:40GB, L4, licence=1.5) + (1.5cpu, keep 0.5cpu){pool=cpu, zone=a}")
    gpu_node, cpu_node = cluster.nodes[0], cluster.nodes[2]
    assert [node.name for node in cluster.nodes] == ["node-0", "node-1", "node-2"]
    assert replace(gpu_node, name="node-1") == cluster.nodes[1]
    assert (gpu_node.cpu_milli, gpu_node.memory_bytes, gpu_node.custom) == (32_000, 128 * GB, (("licence", 1500),))
    assert [(gpu.model, gpu.memory_bytes) for gpu in gpu_node.gpus] == [("A100", 40 * GB)] * 2 + [("L4", 24 * GB)]
    assert cpu_node == Node("node-2", 1500, labels=(("pool", "cpu"), ("zone", "a")), kept_back_milli=500)


@pytest.mark.parametrize(
    "spec",
    [
        "2x(4cpu, 16GB)",
        "2 x (4 cpus, 16 gb)",
        "2*(4CPU,16GiB)",
        "  2x( 4cpu ,\n16g ) ",
        "(4cpu, 16GB) + 4cpu, 16GB",
        "2x(16GB, 4.0cpu)",
        "2x(4e0cpu, 16384MB){}",
    ],
)
def test_spaces_cases_and_orders_do_not_matter(spec: str) -> None:
    assert Cluster.parse(spec) == Cluster((Node("node-0", 4000, 16 * GB), Node("node-1", 4000, 16 * GB)))


def test_the_order_of_labels_and_custom_resources_does_not_matter() -> None:
    one = Cluster.parse("(4cpu, x=1, y=2){b=1, a=2}")
    assert one == Cluster.parse("(4cpu, y=2, x=1){a=2, b=1}")
    assert one == Cluster.from_dict(one_node(labels={"b": "1", "a": "2"}, custom={"y": 2, "x": 1}))


@pytest.mark.parametrize("name", KNOWN_CARDS)
def test_a_known_card_brings_its_memory_and_codecs(name: str) -> None:
    known = KNOWN_CARDS[name]
    cluster = Cluster.parse(f"(4cpu, 2x{name})")
    assert cluster.nodes[0].gpus == (Gpu(name, known.memory_gb * GB, known.nvdecs, known.nvencs),) * 2
    assert cluster.spec() == f"1x(4cpu, 2x{name})"


@pytest.mark.parametrize("name", KNOWN_CARDS)
def test_each_thing_about_a_known_card_can_be_overridden(name: str) -> None:
    known = KNOWN_CARDS[name]
    plain = Gpu(name, known.memory_gb * GB, known.nvdecs, known.nvencs)
    for text, gpu in [
        (f"{name}:7GB", replace(plain, memory_bytes=7 * GB)),
        (f"{name}:nvdec=9", replace(plain, nvdecs=9)),
        (f"{name}:nvencs=0", replace(plain, nvencs=0)),
        (f"{name.lower()}:nvdec=0:7gb:NVENC=8", Gpu(name, 7 * GB, 0, 8)),
    ]:
        spec, data = Cluster.parse(f"(4cpu, {text})"), Cluster.from_dict(one_node(gpus=[text]))
        assert spec.nodes[0].gpus == data.nodes[0].gpus == (gpu,)


def test_an_unknown_card_has_only_what_is_written() -> None:
    gpus = Cluster.parse("(4cpu, 2xgpu:20GB, Foo 9:24GB)").nodes[0].gpus
    assert gpus == (Gpu("gpu", 20 * GB),) * 2 + (Gpu("Foo 9", 24 * GB),)


@pytest.mark.parametrize(
    ("spec", "expected_message", "fixes"),
    [
        ("(4cpu, 2xH10O)", "did you mean 'H100'?", ["(4cpu, 2xH100)"]),
        ("(4cpu, 2xH10O:80GB)", "did you mean 'H100'?", ["(4cpu, 2xH100:80GB)"]),
        ("(4cpu, 2xL4OS:nvdec=1)", "did you mean 'L40S'?", ["(4cpu, 2xL40S:nvdec=1)"]),
        ("(4cpu, H1000)", "did you mean 'H100'?", ["(4cpu, H100)", "(4cpu, H1000:24GB)"]),
        ("(4cpu, 2 gpus)", "'2 gpus' has no GPU model", ["(4cpu, 2xL40S)", "(4cpu, 2xgpu:48GB)"]),
        ("(4cpu, Zeta)", "write its memory as well", ["(4cpu, Zeta:24GB)"]),
        ("4x(32cpu, 128GB 2xL40S)", "a comma is missing", ["4x(32cpu, 128GB, 2xL40S)"]),
        ("32 cpu 128 GB 2 x RTX 4090 a=1", "a comma is missing", ["32 cpu, 128 GB, 2 x RTX 4090, a=1"]),
        ("4x8cpu", "the brackets around '8cpu' are missing", ["4x(8cpu)"]),
        ("(4cpu) + 2 x 8cpu, 32GB, 1xL4 {a=b}", "brackets", ["(4cpu) + 2x(8cpu, 32GB, 1xL4){a=b}"]),
        ("(8cpu, 2.5xL40S)", "nodes have whole cards", ["(8cpu, 2xL40S)", "(8cpu, 3xL40S)"]),
        ("(8cpu, -2xL40S)", "not from 1 to 256", ["(8cpu, 2xL40S)"]),
        ("2.5x(8cpu)", "the number of nodes 2.5 is not a whole number", ["2x(8cpu)", "3x(8cpu)"]),
        ("(-4cpu)", "CPUs -4 is not from 0", ["(4cpu)"]),
        ("(8cpu, keep -2cpu)", "CPUs kept back -2 is not from 0", ["(8cpu, keep 2cpu)"]),
        ("(0cpu, 16GB)", "a node has no CPUs", ["(4cpu, 16GB)"]),
        ("16GB + (4cpu)", "a node has no CPUs", ["4cpu, 16GB + (4cpu)"]),
        ("(4cpu, 16)", "no unit", ["(4cpu, 16GB)", "(4cpu, 16MB)", "(4cpu, 16B)"]),
        ("4x(32cpu, 128GB + 2x(4cpu)", "the bracket '(' is not closed", ["4x(32cpu, 128GB) + 2x(4cpu)"]),
        ("(32cpu){pool=a", "the bracket '{' is not closed", ["(32cpu){pool=a}"]),
        ("4cpu)", "the bracket ')' was not opened", ["4cpu"]),
        ("2xp5.48xlrge{a=1}", "did you mean 'p5.48xlarge'?", ["2xp5.48xlarge{a=1}"]),
        ("2x(Standard_ND96asr_v5, keep 1cpu)", "did you mean", ["2x(Standard_ND96asr_v4, keep 1cpu)"]),
        ("2.5xp5.48xlarge", "not a whole number", ["2xp5.48xlarge", "3xp5.48xlarge"]),
    ],
)
def test_every_fix_of_a_spec_is_a_spec_that_works(spec: str, expected_message: str, fixes: list[str]) -> None:
    problem = problems_of(spec).problems[0]
    assert expected_message in problem.message
    assert [fix.strip('"') for fix in problem.fix_texts] == fixes
    for fix in fixes:
        Cluster.parse(fix)


# ---- instance types


@pytest.mark.parametrize("name", INSTANCE_TYPES)
def test_an_instance_type_has_its_cpus_memory_and_cards(name: str) -> None:
    known = INSTANCE_TYPES[name]
    node = Cluster.parse(f"2x{name}").nodes[1]
    assert (node.cpu_milli, node.memory_bytes) == (known.cpus * 1000, known.memory_gb * GB)
    model, _, memory = known.card.partition(":")
    assert node.gpus == (() if not model else (Gpu.of(model, memory),) * known.card_count)
    assert all(gpu.model in KNOWN_CARDS for gpu in node.gpus)
    assert Cluster.parse(f"(4cpu) + 1x{name.upper()}").nodes[1] == replace(node, name="node-1")
    assert Cluster.from_dict({"nodes": [{"count": 2, "instance": name}]}) == Cluster.parse(f"2x({name})")


def test_an_instance_type_takes_labels_custom_resources_and_cpus_to_keep_back() -> None:
    spec = Cluster.parse("2x(p5.48xlarge, keep 4cpu, licence=1){pool=a}")
    entry = {"count": 2, "instance": "p5.48xlarge", "keep_back": 4, "custom": {"licence": 1}, "labels": {"pool": "a"}}
    assert Cluster.from_dict({"nodes": [entry]}) == spec
    assert spec.spec() == "2x(192cpu, keep 4cpu, 2TB, 8xH100, licence=1){pool=a}"
    assert Cluster.parse("2xND96asr_v4") == Cluster.parse("2x(Standard_ND96asr_v4)")


@pytest.mark.parametrize(
    ("spec", "expected_message"),
    [
        ("(p5.48xlarge, 8cpu)", "CPUs are given twice"),
        ("(p5.48xlarge, 8GB)", "memory is given twice"),
        ("(p5.48xlarge, 2xA100)", "already has its cards"),
        ("(8cpu, p5.48xlarge)", "cannot be combined"),
        ("(p5.48xlarge, p5.48xlarge)", "cannot be combined"),
        ("(2xp5.48xlarge)", "belongs before the bracket"),
        ("x1e.32xlarge", "unknown instance type 'x1e.32xlarge'"),
        ("c4-standard-8", "unknown instance type"),
        ("Standard_M416ms_v2", "unknown instance type"),
        ("gpu-nodes", "an instance type or a file that ends in .yaml"),
        ("autp", "did you mean 'auto'?"),
    ],
)
def test_an_instance_type_that_cannot_be_is_refused_with_the_reason(spec: str, expected_message: str) -> None:
    problem = problems_of(spec).problems[0]
    assert expected_message in problem.message
    assert problem.fix_texts


def test_an_instance_type_in_a_file_excludes_cpus_memory_and_cards() -> None:
    error = problems_in({"nodes": [{"instance": "p5.48xlrge"}, {"instance": "p5.48xlarge", "cpus": 4, "gpus": []}]})
    assert [problem.place for problem in error.problems] == [
        "cluster.nodes[0].instance",
        "cluster.nodes[1].cpus",
        "cluster.nodes[1].gpus",
    ]
    assert error.problems[0].fix_texts[0] == "instance: p5.48xlarge"


def test_the_documentation_has_the_table_of_instance_types() -> None:
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert instance_table() in page, "python -m dovetail.resources.instance_types"


@pytest.mark.parametrize(
    ("spec", "wrong", "expected_message"),
    [
        ("(4cpu, 16)", "16", "no unit"),
        ("(4cpu, -16GB)", "-16GB", "negative"),
        ("(-4cpu)", "-4cpu", "not from 0"),
        ("(nancpu)", "nancpu", "nan"),
        ("(infcpu)", "infcpu", "inf"),
        ("(0.0001cpu)", "0.0001cpu", "smallest"),
        ("(2000000cpu)", "2000000cpu", "not from 0"),
        ("(fourcpu)", "fourcpu", "not a number"),
        ("(cpu)", "cpu", "not a number"),
        ("(4cpu, 5cpu)", "5cpu", "twice"),
        ("(4cpu, 1GB, 2GB)", "2GB", "twice"),
        ("(4cpu, keep 1cpu, keep 2cpu)", "keep 2cpu", "twice"),
        ("(4cpu, a=1, a=2)", "a=2", "twice"),
        ("(4cpu){a=1, a=2}", "a=2", "twice"),
        ("(4cpu, A100:40GB:80GB)", "A100", "twice"),
        ("(4cpu, A100:nvdec=1:nvdec=2)", "A100", "twice"),
        ("(4cpu,, 1GB)", ", 1GB", "nothing"),
        ("(4cpu, a=x)", "a=x", "not a number"),
        ("(4cpu, a=-1)", "a=-1", "not from 0"),
        ("(4cpu, 0xA100)", "0xA100", "number of cards"),
        ("(4cpu, 2000xA100)", "2000xA100", "number of cards"),
        ("(4cpu, A100:lots)", "A100", "not a size"),
        ("(4cpu, A100:nvdec=-1)", "A100", "nvdec"),
        ("(4cpu, A100:nvdec=x)", "A100", "nvdec"),
        ("(4cpu, A100:cores=7)", "A100", "is not a property of a card"),
        ("(4cpu, ?)", "?", "not a card"),
        ("(4cpu){pool}", "pool", "not a name and a value"),
        ("(4cpu){=gpu}", "=gpu", "not a name and a value"),
        ("(4cpu){pool=a|b}", "pool", "not a name and a value"),
        ("0x(4cpu)", "0x", "number of nodes"),
        (f"{NODES_LIMIT + 1}x(4cpu)", "1", "number of nodes"),
        ("4cpu, 16", "16", "no unit"),
        ("(4cpu) +   8cpu, a=b", "a=b", "not a number"),
        ("16GB", "16GB", "no CPUs"),
        ("(16GB)", "16GB", "no CPUs"),
        ("()", ")", "nothing"),
        ("(4cpu, keep 4cpu)", "4cpu", "keeps back all"),
        ("(4cpu) + ", " + ", ""),
        ("(4cpu) (4cpu)", "(4cpu) (", "not a group"),
        ("((4cpu))", "((", "not a group"),
        ("(4cpu", "(4cpu", "is not closed"),
        ("4cpu)", ")", "was not opened"),
        ("(4cpu) + x(4cpu)", "x(", "not a group"),
    ],
)
def test_a_mistake_in_a_spec_is_reported_with_its_column(spec: str, wrong: str, expected_message: str) -> None:
    error = problems_of(spec)
    assert error.codes == ("DT023",)
    problem = error.problems[0]
    assert expected_message in problem.message
    assert all(fix.removeprefix("write").strip() for fix in problem.fix_texts), problem
    if wrong != " + ":
        assert problem.place == f"cluster {spec!r}:{spec.index(wrong) + 1}"


def test_all_mistakes_in_a_spec_are_reported_at_once_each_with_its_column() -> None:
    spec = "0x(4cpu, 16, 3xA100:lots){pool} + ??? + 2x(  xcpu, -1GB, a=b){x=1, x=2} + (1GB) + (9cpu)"
    error = problems_of(spec)
    columns = [int(problem.place.rpartition(":")[2]) for problem in error.problems]
    wrong = ["0x(", "16,", "3xA", "pool", "???", "xcpu", "-1GB", "a=b", "x=2", "1GB)"]
    assert columns == [spec.index(text) + 1 for text in wrong]
    assert all(problem.fix_texts for problem in error.problems)


def test_a_long_spec_is_shortened_in_the_place_but_the_column_is_right() -> None:
    spec = " + ".join(["(4cpu, 16GB)"] * 20 + ["(4gbu)"])
    problem = problems_of(spec).problems[0]
    assert problem.place.endswith(f"...':{spec.index('4gbu') + 1}")
    assert len(problem.place) < 80


@pytest.mark.parametrize("spec", ["", "  ", "\n", None, 4, b"(4cpu)", ["(4cpu)"], {"nodes": []}])
def test_what_is_no_spec_at_all_is_a_cluster_error(spec: Any) -> None:
    error = problems_of(spec)
    assert error.codes == ("DT023",)
    assert len(Cluster.parse(error.problems[0].fix_texts[0].strip("'")).nodes) == 1


@pytest.mark.parametrize(
    "spec", ["{}x(4cpu)", "(4cpu, {}xA100)", "(4cpu, A100:nvdec={})", "({}cpu)", "(4cpu, a={})", "(4cpu, {}GB)"]
)
def test_a_number_of_five_thousand_digits_is_a_mistake_like_any_other(spec: str) -> None:
    assert problems_of(spec.format("9" * 5000)).codes == ("DT023",)


@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(
                [
                    *"4x*(){}=+,:|_. \n\x00\u00b2\u0663",
                    *["cpu", "keep ", "A100", "40GB", "nvdec", "-1", "nan", "1e999", "pool", "2x(4cpu)", "1_GB"],
                ]
            ),
            max_size=20,
        ).map("".join),
    )
)
@example("1x(4cpu, \u00b2)")
@settings(max_examples=10 * settings().max_examples)
def test_any_text_is_a_cluster_or_a_cluster_error(text: str) -> None:
    found = cluster_or_error(lambda: Cluster.parse(text))
    if isinstance(found, Cluster):
        assert all(0 <= node.kept_back_milli < node.cpu_milli for node in found.nodes)
        assert Cluster.parse(found.spec()) == found
    else:
        assert isinstance(found, ClusterError)
        assert all(problem.fix_texts and problem.message for problem in found.problems)


@given(clusters(named=False), st.data())
@settings(max_examples=4 * settings().max_examples)
def test_a_spec_with_a_few_letters_changed_is_a_cluster_or_a_cluster_error(
    cluster: Cluster, data: st.DataObject
) -> None:
    spec = cluster.spec()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(spec)))
        spec = spec[:at] + data.draw(st.sampled_from(["", *"(){}=,:x+-.0 \u0663|_e"])) + spec[at + 1 :]
    found = cluster_or_error(lambda: Cluster.parse(spec))
    if isinstance(found, Cluster):
        assert Cluster.parse(found.spec()) == found
    else:
        assert isinstance(found, ClusterError)
        assert all(problem.fix_texts for problem in found.problems)


# ---- plain data and files

plain_data = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from([10**400, "4GB", "2xA100", "-1GB", "\ud800", "1_GB", ""]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.none(), st.booleans()), inner, max_size=3),
    ),
    max_leaves=8,
)
entry_keys = ["cpus", "instance", "memory", "gpus", "labels", "custom", "keep_back", "name", "count"]
entries = st.fixed_dictionaries(
    {"cpus": st.one_of(st.integers(1, 64), st.floats(0.5, 4), plain_data)},
    optional={
        "memory": st.one_of(st.sampled_from(["4GB", "0B"]), plain_data),
        "gpus": st.one_of(
            st.lists(st.sampled_from(["2xA100", "gpu:20GB", "L4:nvdec=1", "0xL4"]), max_size=2), plain_data
        ),
        "labels": st.one_of(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2), plain_data),
        "custom": st.one_of(st.dictionaries(st.text(max_size=3), st.floats(0, 9), max_size=2), plain_data),
        "keep_back": st.one_of(st.just(0), st.floats(0, 9), plain_data),
        "name": st.one_of(st.text(max_size=3), plain_data),
        "count": st.one_of(st.integers(-1, 3), plain_data),
        "instance": st.one_of(st.sampled_from(["p5.48xlarge", "p5.4xlarg", "x"]), plain_data),
        "cpu": plain_data,
    },
)


@given(
    st.one_of(
        plain_data, st.builds(lambda found: {"nodes": found}, st.lists(st.one_of(entries, plain_data), max_size=3))
    )
)
@settings(max_examples=5 * settings().max_examples)
def test_any_plain_data_is_a_cluster_or_a_cluster_error(data: Any) -> None:
    found = cluster_or_error(lambda: Cluster.from_dict(data))
    if isinstance(found, Cluster):
        assert Cluster.from_dict(found.to_dict()) == found
    else:
        assert isinstance(found, ClusterError)
        assert all(problem.fix_texts and problem.message for problem in found.problems)


def test_a_card_with_a_count_of_five_thousand_digits_in_a_file_is_a_mistake_like_any_other() -> None:
    assert problems_in(one_node(gpus=["9" * 5000 + "xA100"])).codes == ("DT023",)


VALID = b"""nodes:
  - {count: 2, cpus: 32, memory: 128GB, gpus: ["2xA100:40GB"], labels: {pool: gpu}}
  - name: login
    cpus: 8
    keep_back: 2
    custom: {licence: 1}
"""


@given(
    st.one_of(
        st.binary(max_size=60),
        st.lists(
            st.tuples(
                st.integers(0, len(VALID)),
                st.integers(0, 8),
                st.one_of(
                    st.binary(max_size=2),
                    st.sampled_from(
                        [b"\t", b"\xff", b"\x07", b"&a ", b"*a", b"!!int ", b"<<: ", b"- ", b"\n", b": ", b"[", b"{"]
                    ),
                ),
            ),
            min_size=1,
            max_size=4,
        ),
    )
)
@settings(max_examples=5 * settings().max_examples)
def test_any_bytes_in_a_file_are_a_cluster_or_a_deliberate_error(
    tmp_path_factory: pytest.TempPathFactory, change: bytes | list[tuple[int, int, bytes]]
) -> None:
    content = change if isinstance(change, bytes) else VALID
    for at, gone, new in change if isinstance(change, list) else []:
        content = content[:at] + new + content[at + gone :]
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    found = cluster_or_error(lambda: Cluster.load(path))
    if isinstance(found, Cluster):
        assert Cluster.from_dict(found.to_dict()) == found
    else:
        assert found.exit_code == 2
        assert all(problem.fix_texts for problem in found.problems)


def test_a_file_says_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(VALID)
    gpu_node = Node("node-0", 32_000, 128 * GB, (Gpu.of("A100"),) * 2, (("pool", "gpu"),))
    login = Node("login", 8000, custom=(("licence", 1000),), kept_back_milli=2000)
    assert Cluster.load(path) == Cluster((gpu_node, replace(gpu_node, name="node-1"), login))
    assert Cluster.load(str(path)) == Cluster.load(path)


def test_all_mistakes_in_a_file_are_reported_at_once_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    text = """nodes:
  - cpus: -4
  - {cpus: 4, memory: lots, gpus: [A100, "??"]}
  - cpus: 4
    labels: {pool: "a|b"}
    custom:
      licence: -1
    name: x
    count: 2
  - {cpus: 4, keep_back: 4}
"""
    error = problems_of_file(path, text)
    wrong = ["cpus: -4", "memory: lots", '"??"', "pool:", "licence:", "name:", "cpus: 4, keep"]
    assert {problem.place for problem in error.problems} == {f"{path}:{position(text, part)}" for part in wrong}
    assert len(error.problems) == len(wrong)
    assert set(error.codes) == {"DT023"}


@pytest.mark.parametrize(
    "text",
    ["nodes: [{cpus: -4}]\n", "nodes:\n  - memory: 4GB\n    cpus: -4\n", "nodes:\n  - name: x\n    cpus: .nan\n"],
)
def test_a_number_of_cpus_that_cannot_be_is_one_mistake_not_two(tmp_path: Path, text: str) -> None:
    error = problems_of_file(tmp_path / "cluster.yaml", text)
    assert len(error.problems) == 1, str(error)
    assert "-4" in str(error) or "nan" in str(error)


def test_the_wrong_kinds_of_values_are_all_reported_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    text = """nodes:
  - {cpus: "32", memory: 4, gpus: A100}
  - {memory: 4GB, cpu: 4, count: 1.5}
  - {cpus: 4, labels: {zone: 1}, custom: {licence: yes}}
node: 4
"""
    error = problems_of_file(path, text)
    found = {(problem.code, problem.place.removeprefix(f"{path}:")) for problem in error.problems}
    assert found == {
        ("DT013", "2:6"),
        ("DT013", "2:18"),
        ("DT013", "2:29"),
        ("DT012", "3:5"),
        ("DT011", "3:19"),
        ("DT013", "3:27"),
        ("DT013", "4:24"),
        ("DT013", "4:43"),
        ("DT011", "5:1"),
    }
    assert "did you mean 'cpus'?" in str(error)
    assert "did you mean 'nodes'?" in str(error)


@pytest.mark.parametrize(
    "entry", [{"cpus": True}, {"count": True}, {"count": 2.0}, {"cpus": None}, {"name": ""}, {"name": 4}]
)
def test_a_value_that_is_nearly_right_is_an_error(entry: dict[str, Any]) -> None:
    key = next(iter(entry))
    assert problems_in(one_node(**entry)).problems[0].place == f"cluster.nodes[0].{key}"


@pytest.mark.parametrize("count", [0, -1, NODES_LIMIT + 1, 10**30])
def test_a_count_out_of_range_is_an_error(count: int) -> None:
    assert problems_in(one_node(count=count)).codes == ("DT023",)


def test_mistakes_in_data_without_a_file_are_reported_by_their_path() -> None:
    error = problems_in({"nodes": [{"cpus": 4}, {"cpus": 4, "gpus": ["L4", "?"], "custom": {"a": -1}}]})
    assert [problem.place for problem in error.problems] == ["cluster.nodes[1].gpus[1]", "cluster.nodes[1].custom.a"]


def test_a_fix_for_a_file_is_in_the_language_of_the_file(tmp_path: Path) -> None:
    fix = problems_of_file(tmp_path / "cluster.yaml", "nodes:\n  - cpus: 0\n").problems[0].fix_texts[0]
    assert "cpus: 4" in fix


def test_a_cluster_is_found_from_itself_a_file_or_a_spec(tmp_path: Path) -> None:
    cluster = Cluster.parse("(4cpu)")
    assert Cluster.of(cluster) is cluster
    assert Cluster.of("(4cpu)") == cluster
    for name in ("cluster.yaml", "cluster.yml", "cluster.json"):
        (tmp_path / name).write_text('{"nodes": [{"cpus": 4}]}')
        assert Cluster.of(str(tmp_path / name)) == cluster


@pytest.mark.parametrize("what", [None, 4, b"(4cpu)", "", "x", "no such file.yaml", {"nodes": [{"cpus": 4}]}], ids=repr)
def test_what_is_neither_a_cluster_nor_a_file_nor_a_spec_is_a_deliberate_error(what: Any) -> None:
    with pytest.raises(DovetailError) as caught:
        Cluster.of(what)
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].fix_texts


# ---- what any cluster obeys


def test_a_cluster_without_nodes_is_an_error() -> None:
    assert problems_in({"nodes": []}).codes == ("DT020",)
    with pytest.raises(ClusterError, match="DT020"):
        Cluster(())
    with pytest.raises(ClusterError, match="DT020"):
        Cluster.parse("2x(4cpu)").without(["node-0", "node-1"])


def test_two_nodes_of_one_name_are_an_error() -> None:
    twice = {"nodes": [{"cpus": 4, "name": "b"}, {"cpus": 4, "name": "a"}] * 2}
    error = problems_in(twice)
    assert error.codes == ("DT021",)
    assert "'a', 'b'" in str(error)


def test_a_name_that_an_unnamed_node_would_get_is_an_error_not_a_swap() -> None:
    error = problems_in({"nodes": [{"cpus": 4, "name": "node-1"}, {"cpus": 8}]})
    assert error.codes == ("DT021",)
    assert "'node-1'" in str(error)


@pytest.mark.parametrize("text", ["nodes: []\n", "nodes: [{cpus: 1, name: a}, {cpus: 1, name: a}]\n"])
def test_an_error_about_a_whole_file_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    assert problems_of_file(path, text).problems[0].place.startswith(str(path))


def test_reserved_cpus_are_not_given_to_workers() -> None:
    cluster = Cluster.parse("(8cpu, keep 2cpu)")
    assert cluster.nodes[0].usable_cpu_milli == 6000
    assert Ledger(cluster).free[0].cpu_milli == 6000
    assert cluster == Cluster.from_dict(one_node(cpus=8, keep_back=2))


@pytest.mark.parametrize(("share", "kept"), [(0, 0), (0.25, 2000), (0.05, 400), (0.999, 7992)])
def test_a_share_is_kept_back_on_every_node(share: float, kept: int) -> None:
    cluster = Cluster.parse("2x(8cpu) + (4cpu, keep 1cpu)").keeping_back(share)
    assert [node.kept_back_milli for node in cluster.nodes] == [kept, kept, kept // 2]
    assert Cluster.parse(cluster.spec()) == cluster


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan"), float("inf")])
def test_a_share_that_leaves_nothing_is_an_error(share: float) -> None:
    with pytest.raises(ClusterError, match="DT022"):
        Cluster.parse("(8cpu)").keeping_back(share)


def test_without_leaves_the_other_nodes_and_their_names() -> None:
    left = Cluster.parse("3x(4cpu)").without(["node-1", "no such node"])
    assert [node.name for node in left.nodes] == ["node-0", "node-2"]
    assert Cluster.from_dict(left.to_dict()) == left


def test_a_uuid_and_a_note_do_not_make_another_cluster() -> None:
    one = Cluster((Node("a", 1000, gpus=(Gpu.of("L4", uuid="GPU-1"),)),), notes=("read here",))
    other = Cluster((Node("a", 1000, gpus=(Gpu.of("L4", uuid="GPU-2"),)),))
    assert one == other
    assert hash(one) == hash(other)


def test_a_notebook_shows_one_row_per_kind_of_node_and_escapes_labels() -> None:
    shown = Cluster.parse("4x(32cpu, 24684100KB, 2xA100:40GB){pool=<b>} + 1x(8cpu, 64GB)")._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<td>4</td><td>node-0, ...</td><td>32</td><td>23.5GB</td><td>2xA100</td><td>pool=&lt;b&gt;</td>" in shown


def test_a_spec_for_display_rounds_the_memory() -> None:
    cluster = Cluster.parse("1x(2cpu, 24684100KB)")
    assert cluster.spec() == "1x(2cpu, 24684100KB)"
    assert cluster.spec(exact=False) == "1x(2cpu, 23.5GB)"
