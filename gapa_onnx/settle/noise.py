"""The noise of the targets: a small network that reads the hidden representation h of a regression model.

    σ_ale²(h) = scale · (softplus(s(h)) + 1e-6)        scale = mean squared residual, one per target
    loss      = mean of (y - μ)² / 2σ² + ½ log 2πσ²,   σ² = σ_epi² + σ_ale²;  μ and σ_epi² stay as they are

s is the mean of one network per fold of the rows. Each starts as the best constant noise, learns from the
other folds, and is kept as it was when its own fold liked it best. Every row is then judged by a network
that has not learnt from it; by this s is drawn towards the constant: as far as the loss, within one
standard error, lets it. Where nothing is to be gained, the constant is all that remains.

The residuals must be those of data like the data to come. On rows that the model was fitted to they are
too small, and smallest where it has learnt rows by heart; no choice made on these rows can undo that.

Same data and seed, same bytes, whatever the number of threads: matrix products are kept so small that
OpenBLAS runs each in one. Other processors and other BLAS libraries may round differently, and training
makes more of it: there the noise is equally good, but not the same in every digit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.errors import UserError
from gapa_onnx.plan.heads.noise import FLOOR, Layer, NoiseHead, softplus
from gapa_onnx.progress import Progress, silent

# Chosen among about twenty settings by test likelihood on UCI sets: two narrow layers did a little better
# than one wide one, five folds better than a single split on four sets of five, tanh better than relu on
# average; tanh also stays bounded where inputs are unlike the data.
# On ten other sets, one split each, 8 to 32 units and 3 to 10 folds differed little, but for one set where every
# one of these heads did worse than the constant, the wide one most.
FOLDS = 5
UNITS = 16  # of each of the two hidden layers of one network
EPOCHS, PATIENCE = 60, 8
BATCH, RATE = 256, 4e-3  # the rate falls with the batch where wide rows make that smaller

MOST_ROWS = 50_000
MOST_NUMBERS = 100_000_000  # of all rows together: very wide representations give fewer rows
FEWEST_ROWS = 20
MOST_FEATURES = 128  # wider representations are first projected to so many directions
SKETCH_ROWS = 2048  # that show which directions those are
BLOCK_ROWS = 8192
ONE_THREAD = 1 << 18  # multiplications up to which OpenBLAS computes a product in one thread
CONSTANTS = np.geomspace(1e-4, 10, 26)  # where the best constant is looked for, in the same units


def fit_noise(
    hidden: Array,
    residual: Array,
    epistemic_var: Array,
    *,
    seed: int = 0,
    progress: Progress = silent,
) -> NoiseHead:
    """Train a noise head.

    Parameters
    ----------
    hidden: representations (n, d), what the last layer of the model reads.
    residual: target minus prediction (n, targets), or (n,) for one target.
    epistemic_var: variance of the prediction (n, targets), or (n,).
    seed: of the folds, the initial weights and the order of the rows.
    progress: is told what is done and the fraction done.

    Rows with anything that is not finite are left out; of more than 50,000 a random part is used.
    """
    rng = np.random.default_rng(seed)
    hidden, residual, epistemic = _rows(hidden, residual, epistemic_var, rng)
    scale = np.mean(residual**2, axis=0)  # (t,)
    squared = (residual**2 / scale).astype(np.float32)  # (n, t)
    epistemic = (epistemic / scale).astype(np.float32)
    centre, projection = _directions(hidden, rng)
    features = _features(hidden, centre, projection)  # (n, r)
    constant = best_constant(squared, epistemic)  # (t,)
    start = np.log(np.expm1(constant))

    folds = np.array_split(rng.permutation(len(features)), FOLDS)
    networks = _train(features, squared, epistemic, start, folds, rng, progress)
    unseen = np.empty_like(squared)  # s of every row, by the network that has not learnt from it
    for fold, network in zip(folds, _each(networks)):
        unseen[fold] = _outputs(network, features[fold])
    kept = np.array(
        [_kept(unseen[:, j], start[j], squared[:, j], epistemic[:, j]) for j in range(len(scale))]
    )
    progress("training the noise head", 1.0)

    unit = 0.5 * np.mean(np.log(2 * np.pi * scale))  # back from units of the residual
    drawn = start + kept * (unseen - start)
    return NoiseHead(
        weights=_merge(networks, kept, start, centre, projection),
        scale=scale,
        nll=float(unit + np.mean(_loss(drawn, squared, epistemic))),
        constant_nll=float(unit + np.mean(_loss(start, squared, epistemic))),
        rows=len(features),
    )


# ------------------------------------------------------------------------------- rows


def _rows(
    hidden: Array, residual: Array, epistemic: Array, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Checked and finite rows: hidden (n, d) as it is, residual and epistemic (n, t) in float64."""
    hidden = np.asarray(hidden)
    residual, epistemic = (np.asarray(array, np.float64) for array in (residual, epistemic))
    residual, epistemic = (array[:, None] if array.ndim == 1 else array for array in (residual, epistemic))
    if hidden.ndim != 2:
        raise UserError(
            f"the noise head reads one vector a row, but the hidden representation has shape {hidden.shape}",
            "choose a tensor of shape (rows, units)",
        )
    if residual.ndim != 2 or len(residual) != len(hidden) or residual.shape != epistemic.shape:
        raise UserError(
            f"{len(hidden)} rows of hidden representations do not go with residuals of shape "
            f"{residual.shape} and variances of shape {epistemic.shape}",
            "give one target for every calibration row, in the shape of the model's output",
        )
    good: Array = np.array(np.isfinite(np.hstack([residual, epistemic])).all(axis=1))
    for start in range(0, len(hidden), BLOCK_ROWS):
        good[start : start + BLOCK_ROWS] &= np.isfinite(hidden[start : start + BLOCK_ROWS]).all(axis=1)
    rows = np.flatnonzero(good)
    if len(rows) < FEWEST_ROWS:
        raise UserError(
            f"only {len(rows)} of {len(good)} rows have finite targets, outputs and hidden values",
            f"a noise head needs at least {FEWEST_ROWS} of them, and better some hundreds",
        )
    most = min(MOST_ROWS, max(MOST_NUMBERS // (hidden.shape[1] + residual.shape[1]), FEWEST_ROWS))
    if len(rows) > most:
        rows = np.sort(rng.choice(rows, most, replace=False))
    if len(rows) < len(good):
        hidden, residual, epistemic = hidden[rows], residual[rows], epistemic[rows]
    if (epistemic < 0).any():
        raise UserError("some epistemic variances are negative", "a variance is at least 0")
    if (residual == 0).all(axis=0).any():
        raise UserError(
            "the targets equal the model's outputs, so there is no noise to learn",
            "give the measured values as targets, not the predictions",
        )
    return hidden, residual, epistemic


def _blocks(hidden: Array) -> Iterator[Array]:
    """Rows as float64, a block at a time."""
    return (hidden[k : k + BLOCK_ROWS].astype(np.float64) for k in range(0, len(hidden), BLOCK_ROWS))


def _directions(hidden: Array, rng: np.random.Generator) -> Layer:
    """Centre (d,) and map (d, r): features (h - centre) @ map have mean square 1.

    Units that do not move by more than their own rounding are left out. Above `MOST_FEATURES` units, the
    map goes to the leading subspace of the standardised rows, by two steps of subspace iteration.
    """
    centre = sum(block.sum(axis=0) for block in _blocks(hidden)) / len(hidden)
    std = np.sqrt(sum(((block - centre) ** 2).sum(axis=0) for block in _blocks(hidden)) / len(hidden))
    moving = np.flatnonzero(std > 1e-5 * np.abs(centre))
    if not len(moving):
        raise UserError(
            "the hidden representation is the same for every row",
            "check that the calibration rows differ, or choose another hidden tensor",
        )
    width = min(len(moving), MOST_FEATURES)
    projection = np.zeros((len(std), width))
    if len(moving) == width:
        projection[moving, np.arange(width)] = 1 / std[moving]
        return centre, projection
    sample = np.sort(rng.choice(len(hidden), min(SKETCH_ROWS, len(hidden)), replace=False))
    rows = (hidden[sample][:, moving] - centre[moving]) / std[moving]
    basis = rng.standard_normal((len(moving), width))
    for _ in range(2):
        basis = _orthonormal(_product(rows.T, _product(rows, basis)))
    projection[moving] = basis / std[moving, None]
    return centre, projection / np.sqrt(np.mean(_product(rows, basis) ** 2))


def _orthonormal(columns: Array) -> Array:
    """Gram-Schmidt, in place; directions that the rows do not have become zeros."""
    for k in range(columns.shape[1]):
        column, before = columns[:, k], columns[:, :k]
        size = np.linalg.norm(column)
        for _ in range(2):  # the second time takes what rounding has left of the columns before
            column -= np.einsum("ij,j->i", before, np.einsum("ij,i->j", before, column))
        rest = np.linalg.norm(column)
        columns[:, k] = column / rest if rest > 1e-10 * size else 0
    return columns


def _features(hidden: Array, centre: Array, projection: Array) -> Array:
    """(h - centre) @ map in float32, (n, r)."""
    parts = [_product(block - centre, projection).astype(np.float32) for block in _blocks(hidden)]
    return np.concatenate(parts)


def _product(a: Array, b: Array) -> Array:
    """a @ b for matrices of any size, in pieces of one thread each."""
    result = np.zeros((a.shape[0], b.shape[1]))
    inner = max(1, min(a.shape[1], 128, ONE_THREAD // b.shape[1]))
    rows = max(1, ONE_THREAD // (inner * b.shape[1]))
    for i in range(0, a.shape[0], rows):
        for k in range(0, a.shape[1], inner):
            result[i : i + rows] += a[i : i + rows, k : k + inner] @ b[k : k + inner]
    return result


# --------------------------------------------------------------------------- the loss


def _loss(s: Array, squared: Array, epistemic: Array) -> Array:
    """½ (r²/σ² + log σ²) of each row, in units of the mean squared residual, without ½ log 2π."""
    var = epistemic + softplus(s) + FLOOR
    return 0.5 * (squared / var + np.log(var))


def best_constant(squared: Array, epistemic: Array) -> Array:
    """The constant noise (t,) of least loss: the best of a grid, then golden sections of log c."""

    def loss(c: Array) -> Array:
        var = epistemic + c
        mean: Array = np.mean(squared / var + np.log(var), axis=0)
        return mean

    best = np.argmin([loss(c) for c in CONSTANTS], axis=0)
    low = np.log(CONSTANTS[np.maximum(best - 1, 0)])
    high = np.log(CONSTANTS[np.minimum(best + 1, len(CONSTANTS) - 1)])
    golden = (np.sqrt(5) - 1) / 2
    for _ in range(25):  # the interval shrinks to 1e-5 of its width
        a, b = high - golden * (high - low), low + golden * (high - low)
        left = loss(np.exp(a)) < loss(np.exp(b))
        low, high = np.where(left, low, a), np.where(left, b, high)
    constant: Array = np.exp((low + high) / 2)
    return constant


def _kept(s: Array, start: float, squared: Array, epistemic: Array) -> float:
    """The least share of s - start, in steps of 0.05, whose loss is within a standard error of the best."""
    shares = np.linspace(0, 1, 21)
    losses = [_loss(start + share * (s - start), squared, epistemic) for share in shares]  # each (n,)
    best = losses[int(np.argmin([np.mean(loss) for loss in losses]))]
    for share, loss in zip(shares, losses):
        worse = loss - best
        if np.mean(worse) <= np.std(worse) / np.sqrt(len(worse)):
            return float(share)
    raise AssertionError("the best share is within a standard error of itself")


# ----------------------------------------------------------------------- the networks
# Parameters are a list W1, b1, W2, b2, …; those of all folds together have the fold as their first axis.


def _forward(parameters: list[Array], rows: Array) -> list[Array]:
    """What each layer reads, and at the end s."""
    values = [rows]
    for k in range(0, len(parameters), 2):
        x = np.tanh(values[-1]) if k else values[-1]
        values[-1] = x
        values.append(x @ parameters[k] + parameters[k + 1])
    return values


def _gradients(parameters: list[Array], rows: Array, squared: Array, epistemic: Array) -> list[Array]:
    """Derivatives of the mean loss by the parameters, for rows (…, b, d)."""
    values = _forward(parameters, rows)
    s = values.pop()
    var = epistemic + softplus(s) + FLOOR
    by_output = 0.5 * (1 - squared / var) / var / (1 + np.exp(-s)) / (s.shape[-2] * s.shape[-1])
    gradients: list[Array] = []
    for k in range(len(parameters) - 2, -1, -2):
        x = values.pop()
        gradients += [by_output.sum(axis=-2, keepdims=True), x.swapaxes(-1, -2) @ by_output]
        if k:
            by_output = (by_output @ parameters[k].swapaxes(-1, -2)) * (1 - x * x)
    return gradients[::-1]


def _outputs(parameters: list[Array], rows: Array) -> Array:
    """s (n, t) of one network."""
    size = _batch(parameters)
    return np.concatenate([_forward(parameters, rows[k : k + size])[-1] for k in range(0, len(rows), size)])


def _batch(parameters: list[Array]) -> int:
    """How many rows keep every product of a step in one thread."""
    largest: int = max(weight.shape[-2] * weight.shape[-1] for weight in parameters[::2])
    return max(8, min(BATCH, ONE_THREAD // largest))


def _each(networks: list[Array]) -> list[list[Array]]:
    """The parameters of every fold for itself."""
    return [[array[k] for array in networks] for k in range(len(networks[0]))]


def _train(
    features: Array,
    squared: Array,
    epistemic: Array,
    start: Array,
    folds: list[Array],
    rng: np.random.Generator,
    progress: Progress,
) -> list[Array]:
    """One network a fold, all trained side by side by Adam; each at its best epoch, the constant included."""
    sizes = [features.shape[1], UNITS, UNITS, squared.shape[1]]
    networks = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        networks.append(rng.standard_normal((len(folds), fan_in, fan_out)) / np.sqrt(fan_in))
        networks.append(np.zeros((len(folds), 1, fan_out)))
    networks[-2][:] = 0  # so that training starts at the constant
    networks[-1][:] = start
    networks = [array.astype(np.float32) for array in networks]
    best = [array.copy() for array in networks]

    def judge(fold: Array, network: list[Array]) -> float:
        return float(np.mean(_loss(_outputs(network, features[fold]), squared[fold], epistemic[fold])))

    best_loss = [judge(fold, network) for fold, network in zip(folds, _each(networks))]
    others = [np.concatenate(folds[:k] + folds[k + 1 :]) for k in range(len(folds))]
    rows = min(map(len, others))
    batch = min(_batch(networks), max(rows // 4, 8))
    rate = RATE * _batch(networks) / BATCH
    moments = [(np.zeros_like(array), np.zeros_like(array)) for array in networks]
    step = improved = 0
    for epoch in range(EPOCHS):
        progress("training the noise head", epoch / EPOCHS)
        order = np.stack([rng.permutation(part)[:rows] for part in others])  # (folds, rows)
        for first in range(0, rows - batch + 1, batch):
            chosen = order[:, first : first + batch]
            step += 1
            gradients = _gradients(networks, features[chosen], squared[chosen], epistemic[chosen])
            length = np.float32(rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step))
            for array, gradient, (mean, square) in zip(networks, gradients, moments):
                mean += np.float32(0.1) * (gradient - mean)
                square += np.float32(0.001) * (gradient * gradient - square)
                array -= length * mean / (np.sqrt(square) + np.float32(1e-8))
        for k, network in enumerate(_each(networks)):
            loss = judge(folds[k], network)
            if loss < best_loss[k]:
                best_loss[k], improved = loss, epoch
                for array, kept in zip(network, best):
                    kept[k] = array
        if epoch - improved >= PATIENCE:
            break
    return best


def _merge(
    networks: list[Array],
    kept: Array,
    start: Array,
    centre: Array,
    projection: Array,
) -> tuple[Layer, ...]:
    """One network that reads h and gives start + kept · (mean of all s - start).

    The first layers stand side by side, the second ones as blocks on a diagonal; where nothing is kept
    of any target, layers of one unit and zeros give the constant.
    """
    if not kept.any():
        widths = (len(centre), 1, 1, len(start))
        zeros = [np.zeros(shape, np.float32) for shape in zip(widths, widths[1:])]
        biases = [np.zeros(1, np.float32), np.zeros(1, np.float32), start.astype(np.float32)]
        return tuple(zip(zeros, biases))
    w1, b1, w2, b2, w3, b3 = (array.astype(np.float64) for array in networks)
    count, units = len(w1), w1.shape[2]
    first = _product(projection, np.concatenate(list(w1), axis=1))  # (d, folds · units)
    second = np.zeros((count * units, count * units))
    for k in range(count):
        second[k * units : (k + 1) * units, k * units : (k + 1) * units] = w2[k]
    layers = (
        (first, b1.ravel() - np.einsum("i,ij->j", centre, first)),
        (second, b2.ravel()),
        (w3.reshape(count * units, -1) * kept / count, start + kept * (b3.mean(axis=0)[0] - start)),
    )
    return tuple((weight.astype(np.float32), bias.astype(np.float32)) for weight, bias in layers)
