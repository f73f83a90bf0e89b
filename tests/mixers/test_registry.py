"""A new way to mix tokens is one file and one line of the registry, and exact through the engine."""

import pytest
import transformers

from tests.mixers.toy import Convolution, save_toy_model
from tests.support import actor_loss, assert_same, group, make_engine, run_engine, run_reference
from verl_pg_plugin.architectures import architecture_issues
from verl_pg_plugin.engine.prepare import prepare_model
from verl_pg_plugin.mixers import MIXERS, count_layers
from verl_pg_plugin.modalities import TEXT
from verl_pg_plugin.synthetic import Sample, make_batch

pytestmark = pytest.mark.usefixtures("process_group")

TRIE = [
    *group(7, [5, 2, 3], 1),
    *(Sample([1, 2, 3, 4], [5, 6, *tail]) for tail in ([7, 8, 9, 1], [7, 8, 2], [3])),
]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def with_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, Convolution.name, Convolution())


@pytest.mark.parametrize("options", [{}, {"engine": {"compile_layers": True}}, {"engine": {"verify": "first"}}])
@pytest.mark.usefixtures("with_convolutions")
def test_a_mixer_of_twenty_lines_is_exact_through_the_engine(toy: str, options: dict) -> None:
    batch = make_batch(TRIE, max_token_len_per_gpu=28)
    engine = make_engine(toy, packed=True, **options)
    assert_same(run_engine(engine, batch, actor_loss()), run_reference(toy, batch, actor_loss()))
    assert engine.shared_model.layers == {"attention": 2, "convolution": 1}


@pytest.mark.usefixtures("with_convolutions")
def test_a_layer_that_does_not_mix_shared_rows_is_an_error_that_names_its_mixer(
    toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Convolution, "install", lambda self, module: None)
    engine = make_engine(toy, packed=True)
    with engine.eval_mode(), pytest.raises(RuntimeError, match="convolution over shared prefixes ran in 0 of 1 layers"):
        engine.infer_batch(make_batch(TRIE))


def test_layers_without_a_mixer_are_refused_by_name(toy: str) -> None:
    config = transformers.AutoConfig.from_pretrained(toy)
    assert count_layers(config) == {"attention": 2}
    assert ["conv" in issue.why for issue in architecture_issues(config, trust_remote_code=False)] == [True]


@pytest.mark.usefixtures("with_convolutions")
def test_a_mixer_that_cannot_spread_rows_over_ranks_is_refused_under_ulysses(toy: str) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(toy)
    with pytest.raises(ValueError, match=r"convolution layers .* ulysses_sequence_parallel_size=1"):
        prepare_model(module, PrefixGrouperOptions())


@pytest.mark.usefixtures("with_convolutions")
def test_groups_are_not_carried_where_a_mixer_cannot(toy: str) -> None:
    engine = make_engine(toy, packed=True)
    assert engine._carry_policy(forward_only=True) is None
