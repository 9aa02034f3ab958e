"""The training examples: they run, backends and devices train alike, and the cache is
right."""

import dataclasses
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
IMPLEMENTATIONS = ("ffi", "xla")


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def example():
    return imported("train_char_lm")


@pytest.fixture(scope="module")
def on_mesh():
    return imported("train_on_mesh")


@pytest.fixture(scope="module")
def text():
    """Bytes with structure to learn, made here: the same on every machine."""
    rng = np.random.default_rng(0)
    words = np.array([b"def ", b"return ", b"self.", b"(x)", b":\n    ", b"None\n"])
    data = b"".join(words[rng.integers(0, len(words), 4000)])
    return np.frombuffer(data, np.uint8)


@pytest.fixture(scope="module")
def small_model(example):
    return example.ModelConfig(
        num_layers=2, model_dim=32, head_dim=8, mlp_dim=64, window=16
    )


def test_backends_train_alike(example, text, small_model):
    config = example.TrainConfig(
        num_steps=12, batch_size=4, seq_len=48, num_warmup_steps=2, num_eval_windows=8
    )
    results = {}
    for name in IMPLEMENTATIONS:
        model = dataclasses.replace(small_model, implementation=name)
        params, losses, validation = example.train(text, text, model, config)
        results[name] = (losses, validation[-1][1], params)
    ffi, xla = results["ffi"], results["xla"]
    # float32 in another order; twelve steps leave the two little room to drift apart.
    np.testing.assert_allclose(ffi[0], xla[0], rtol=2e-4)
    np.testing.assert_allclose(ffi[1], xla[1], rtol=2e-4)
    assert xla[0][-1] < 0.8 * xla[0][0], "the loss must fall"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cached_steps_match_the_whole_sequence(example, small_model, implementation):
    model = dataclasses.replace(small_model, implementation=implementation)
    params = example.init_params(jax.random.key(1), model)
    tokens = jax.random.randint(jax.random.key(2), (1, 40), 0, 256)
    expected, _ = example.forward(params, tokens, model)

    shape = (1, 64, model.num_kv_heads, model.head_dim)
    # NaN in the unused slots: nothing beyond the used length may be read.
    empty = jnp.full(shape, jnp.nan)
    cache = [(empty, empty)] * model.num_layers
    step = jax.jit(
        lambda tokens, cache, position: example.forward(
            params, tokens, model, cache, position
        )
    )
    logits, cache = step(tokens[:, :33], cache, jnp.int32(0))
    np.testing.assert_allclose(logits, expected[:, :33], atol=2e-5)
    for position in range(33, 40):
        token = tokens[:, position : position + 1]
        logits, cache = step(token, cache, jnp.int32(position))
        np.testing.assert_allclose(
            logits, expected[:, position : position + 1], atol=2e-5
        )


def test_whole_command(example, tmp_path, capsys):
    sizes = ["--steps=2", "--batch-size=2", "--seq-len=32", "--sample-bytes=20"]
    # Named, because the default says so in a warning when it has to take this one.
    metrics = example.main(
        [*sizes, "--implementation=xla", "--output-dir", str(tmp_path)]
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").read_text().startswith("class ")
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert np.isfinite(metrics["validation_bits_per_byte"])
    assert "final loss, bits per byte: training" in capsys.readouterr().out


def test_text_is_split_by_file(example):
    train, validation = example.load_text(example.stdlib_folder())
    assert validation.size < train.size
    assert 0.03 < validation.size / (train.size + validation.size) < 0.25


def test_folder_without_sources_is_refused(example, tmp_path):
    with pytest.raises(SystemExit, match="--text"):
        example.load_text(tmp_path)


def test_bad_arguments_are_refused(example, capsys):
    with pytest.raises(SystemExit):
        example.parse_args(["--steps", "0"])
    assert "--steps must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("axis", "splits"), [("tensor", 2), ("tensor", 4), ("seq", 4)])
def test_devices_train_alike(on_mesh, text, small_model, axis, splits):
    config = on_mesh.lm.TrainConfig(
        num_steps=5, batch_size=4, seq_len=32, num_warmup_steps=2
    )
    mesh = on_mesh.make_mesh(splits, axis, jax.devices("cpu"))
    several = on_mesh.train_split(text, mesh, small_model, config)
    one = on_mesh.train_on_one(text, small_model, config)
    np.testing.assert_allclose(several, one, rtol=2e-4)
    assert one[-1] < one[0]


def test_parameters_are_split(on_mesh, small_model):
    """Heads over the axis; two key/value heads stay whole on four devices."""
    params = on_mesh.lm.init_params(jax.random.key(0), small_model)
    for splits, kv in ((2, (32, 1, 8)), (4, (32, 2, 8))):
        mesh = on_mesh.make_mesh(splits, "tensor", jax.devices("cpu"))
        placed = jax.device_put(params, on_mesh.param_shardings(params, mesh))
        layer = placed["layers"][0]
        shapes = {k: x.addressable_shards[0].data.shape for k, x in layer.items()}
        assert shapes["query"] == (32, 4 // splits, 8)
        assert shapes["key"] == shapes["value"] == kv
        assert shapes["down"] == (64 // splits, 32)
        assert shapes["mlp_norm"] == (32,)


def test_whole_command_on_a_mesh(on_mesh, capsys):
    options = ["--steps=2", "--batch-size=2", "--seq-len=16", "--context", "--compare"]
    losses = on_mesh.main([*options, "--splits=4"])
    assert np.isfinite(losses).all()
    assert "{'data': 2, 'seq': 4}" in capsys.readouterr().out


def test_mesh_that_does_not_fit_is_refused(on_mesh, capsys):
    for options, text in (
        (["--splits=3"], "--splits must divide the number of devices, 8"),
        (["--batch-size=3"], "--batch-size must be a multiple of 4"),
        (["--context", "--seq-len=12"], "--seq-len must be a multiple of 8"),
    ):
        with pytest.raises(SystemExit):
            on_mesh.parse_args(options)
        assert text in capsys.readouterr().err
