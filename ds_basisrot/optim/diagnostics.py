"""Whether basis rotation does its work, in numbers: misalignment, turning of a basis, oscillation of updates, (1,1)-norm of the Hessian.

Plain functions of tensors; none keeps state, changes an argument, or is used by an update. What each costs, for one matrix `[m, n]`:

    misalignment, relative_11_norm      two products of k x k matrices for each side (k = m or n)
    rotation_angle                      elementwise, but needs the basis from before the refresh
    persistence                         elementwise, nothing but what the optimizer keeps anyway
    oscillation                         elementwise, but needs the previous update: one more weight-sized tensor
    hessian_*_norm                      one loss and gradient, then about two more backward passes for each probe: not for every update

Results have the dtype of the arguments, at least float32. A matrix that is zero gives the value of a perfect one; a NaN gives NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Pair = tuple[Tensor | None, Tensor | None]  # (U, V) of a matrix; None where a side is not rotated


def misalignment(covariance: Tensor, basis: Tensor | None = None) -> Tensor:
    """How far a covariance is from diagonal in a basis: the off-diagonal share of its squared Frobenius norm, without unit.

        ||A - diag(A)||_F^2 / ||A||_F^2  with  A = U^T C U

    0 when the columns of U are eigenvectors of C, at most 1 - 1/k. It weighs the large eigenvalues most: those whose directions
    set the size of the updates. The norm is the same in every basis, so values of one covariance in two bases compare directly.

    Args:
        covariance: C `[..., k, k]`, symmetric and positive semidefinite (E[G G^T] for the left side, E[G^T G] for the right one).
        basis: U `[..., k, k]`, orthonormal columns; None for the standard basis.

    Returns:
        `[...]`. Accurate to rounding near 0 too: the off-diagonal part is summed, not obtained as a difference.
    """
    rotated = _in_basis(covariance, basis)
    off_diagonal = _without_diagonal(rotated).square().sum((-2, -1))
    return _ratio(off_diagonal, rotated.square().sum((-2, -1)))


def relative_11_norm(covariance: Tensor, basis: Tensor | None = None) -> Tensor:
    """The (1,1)-norm sum_ij |A_ij| of A = U^T C U, relative to the smallest one that any basis has, without unit.

    No basis makes the (1,1)-norm smaller than the sum of the eigenvalues, and the eigenbasis reaches it. For a covariance that sum is the
    trace, the same in every basis and equal to the diagonal's part of the norm: the value is 1 + sum_{i != j} |A_ij| / trace(C), from 1
    in the eigenbasis up to k. The (1,1)-norm of the Hessian bounds what staleness costs (arXiv 2602.03515); here the covariance of the
    gradients stands in for it. Unlike `misalignment` it grows with the number of small entries off the diagonal.

    Args and shapes as for `misalignment`.
    """
    rotated = _in_basis(covariance, basis)
    return 1 + _ratio(_without_diagonal(rotated).abs().sum((-2, -1)), rotated.diagonal(dim1=-2, dim2=-1).sum(-1))


def rotation_angle(old: Tensor, new: Tensor, order: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """How far a refresh has turned a basis: the mean angle between a new column and the old one it continues, in degrees from 0 to 90.

        sum_i w_i arccos |<old_{order_i}, new_i>| / sum_i w_i

    The sign of a column means nothing, hence the magnitude. Columns of nearly equal eigenvalue turn freely within their span, and columns
    without gradient turn anyhow, which makes the plain mean large and means nothing: weigh the columns by their Rayleigh quotients.

    Args:
        old, new: bases `[..., k, k]`, columns of unit length.
        order: `[..., k]`, the old column that each new one continues, as the refresh orders them; None: column i continues column i.
        weights: `[..., k]`, of the new columns, not negative (rounding below 0 counts as 0); None, or all zero: equal ones.

    Returns:
        `[...]`. Half the angle comes from the arctangent of |a - b| / |a + b|, accurate at both ends; arccos and the root of 1 - cos^2
        lose all angles below 0.02 degrees in float32.
    """
    old, new = _at_least_float32(old), _at_least_float32(new)
    if order is not None:
        old = old.gather(-1, order.unsqueeze(-2).expand(old.shape))
    apart, along = (new - old).norm(dim=-2), (new + old).norm(dim=-2)
    angles = torch.rad2deg(2 * torch.atan2(torch.minimum(apart, along), torch.maximum(apart, along)))
    if weights is None:
        return angles.mean(-1)
    weights = _at_least_float32(weights).clamp_min(0)
    weights = torch.where(weights.amax(-1, keepdim=True) == 0, 1.0, _unit_scale(weights, (-1,)))
    return (weights * angles).sum(-1) / weights.sum(-1)


def oscillation(update: Tensor, previous_update: Tensor) -> Tensor:
    """How far an update turns back on the previous one: (1 - cos) / 2, 0 for the same direction, 1/2 at right angles, 1 for the opposite.

    A late update is the one that was right some updates ago: it helps now only as far as successive updates agree, and where they alternate
    it points the wrong way. The cosine is the same in every basis (a share of flipped signs is not), so optimizers with and without
    rotation compare. It costs memory, a copy of the previous update; `persistence` does not.

    Args:
        update, previous_update: `[..., m, n]`, of one matrix, in one basis; the scale of either means nothing.

    Returns:
        `[...]`, one value for each matrix. 0 where either is zero.
    """
    one, other = (_unit_scale(_at_least_float32(u), (-2, -1)) for u in (update, previous_update))
    lengths = torch.linalg.matrix_norm(one), torch.linalg.matrix_norm(other)  # at least 1, or all elements are 0
    apart = one / lengths[0].clamp_min(1)[..., None, None] - other / lengths[1].clamp_min(1)[..., None, None]
    return torch.where((lengths[0] == 0) | (lengths[1] == 0), 0.0, apart.square().sum((-2, -1)) / 4)


def persistence(momentum: Tensor, second_moment: Tensor, step: int, betas: tuple[float, float]) -> Tensor:
    """How much of the gradients' size survives averaging: sum |M| / sum sqrt(S), both bias-corrected; small when gradients oscillate.

    For unit variance of the gradients and many updates, with b1 the momentum's decay:

        1                                    gradients that do not change
        sqrt(2/pi (1 - b1) / (1 + b1))       independent ones of mean 0 (0.18 at b1 = 0.9)
        (1 - b1) / (1 + b1)                  ones that change sign at every update (0.05 at b1 = 0.9)

    It is also Adam's mean step relative to its full-size step. For a short while after gradients grow it may exceed 1. Coordinates with
    large gradients weigh more. No memory but the optimizer's own; any common unit of the gradients cancels.

    Args:
        momentum, second_moment: M and S `[..., m, n]` as the optimizer keeps them, not corrected, in the (rotated) basis the optimizer
            divides them in.
        step: updates made so far, at least 1.
        betas: their decay rates.

    Returns:
        `[...]`, one value for each matrix. 1 where S is zero.
    """
    if step < 1:
        raise ValueError(f"step: must be at least 1, the number of updates in the moments, got {step}")
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step) / (1 - beta1**step)
    sizes = _at_least_float32(momentum).abs().sum((-2, -1))
    roots = _at_least_float32(second_moment).sqrt().sum((-2, -1))
    return torch.where(roots == 0, 1.0, correction * _ratio(sizes, roots))


def hessian_11_norm(
    loss_fn: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    probes: int = 100,
    generator: torch.Generator | None = None,
    bases: Mapping[Tensor, Pair] | None = None,
) -> float:
    """The (1,1)-norm sum_ij |H_ij| of the Hessian of a loss with respect to `parameters`, cross terms between them included.

    In rotated coordinates, W = U W' V^T for each parameter, if `bases` are given: what basis rotation is meant to make small.

    Estimated with random vectors (arXiv 2410.08198): if v has independent standard Cauchy entries, (H v)_i is Cauchy with scale
    s_i = sum_j |H_ij|, a row of the norm. E|(H v)_i|^p = s_i^p / cos(pi p / 2) makes the geometric mean of |(H v)_i| over n probes, times
    cos(pi / 2n)^n, an unbiased estimate of s_i. It is taken on the fly; the usual median over the probes has about the same error, but a
    bias, and must keep them all. One row has a relative standard error of pi / (2 sqrt n): 16% at n = 100. The rows share their probes, so
    the sum is better only as far as rows differ: measured 12% at n = 100 and 3.5% at n = 1000 for random dense symmetric matrices of any
    size, a row's 16% and 5% for rank 1, and for diagonal ones a row's error over the root of their number. With one generator seed, two
    bases see the same probes.

    The probes are heavy-tailed, and rounding errors of their largest entries appear in all rows: float32 parameters changed the sum of a
    two-layer network by 1e-6 at 33 thousand parameters; convert a copy of the model to float64 when in doubt.

    Args:
        loss_fn: returns the scalar loss. It is called once, and all probes use that graph; attention runs as plain products in it,
            since fused kernels have no second derivative. Whatever else the call does to a model (running statistics) is its own doing.
        parameters: float32 or float64, that the loss may depend on. Their `grad` is not touched.
        probes: Hessian-vector products, at least 3.
        generator: source of the probes; None: a new one with a fixed seed. The global random numbers are not touched in either case, nor by
            dropout in `loss_fn`.
        bases: (U `[..., m, m]` or None, V `[..., n, n]` or None) for a parameter `[..., m, n]`; others stay in standard coordinates.

    Raises:
        ValueError: a loss that is not a scalar, parameters, probes or bases that do not fit.
    """
    if probes < 3:
        raise ValueError(f"probes: must be at least 3 for an estimate with a finite error, got {probes}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    pairs = [_checked_pair(p, (bases or {}).get(p, (None, None))) for p in parameters]
    product = _hessian_product(loss_fn, parameters)
    logs = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in parameters]
    counts = [torch.zeros(p.shape, dtype=torch.int32, device=p.device) for p in parameters]
    for _ in range(probes):
        draws = [torch.empty(p.shape, dtype=torch.float64, device=generator.device).cauchy_(generator=generator) for p in parameters]
        largest = max(float(v.abs().max()) for v in draws if v.numel())  # products of entries of at most 1 do not overflow
        rows = product([_to_standard((v / largest).to(p), pair) for p, v, pair in zip(parameters, draws, pairs)])
        for log, count, row, pair in zip(logs, counts, rows, pairs):
            sizes = _to_rotated(row, pair).double().abs()
            # A product that is exactly 0 is rounded away, or its whole row of the Hessian is 0: it is left out of the mean.
            count += sizes != 0
            log += torch.where(sizes != 0, sizes.log() + math.log(largest), 0.0)
    return sum(float(_unbiased_geometric_mean(log, count).sum()) for log, count in zip(logs, counts))


def hessian_frobenius_norm(
    loss_fn: Callable[[], Tensor], parameters: Sequence[Tensor], probes: int = 100, generator: torch.Generator | None = None
) -> float:
    """The Frobenius norm of the same Hessian, equal in every basis: E ||H z||^2 = ||H||_F^2 for independent standard normal z_i.

    Arguments and errors as for `hessian_11_norm`, with at least 1 probe. The relative standard error is at most 1 / sqrt(2 probes), reached
    for a Hessian of rank 1: 7% at 100.
    """
    if probes < 1:
        raise ValueError(f"probes: must be at least 1, got {probes}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    product = _hessian_product(loss_fn, parameters)
    total = 0.0
    for _ in range(probes):
        draws = [torch.empty(p.shape, dtype=torch.float64, device=generator.device).normal_(generator=generator) for p in parameters]
        total += sum(float(row.double().square().sum()) for row in product([z.to(p) for p, z in zip(parameters, draws)]))
    return math.sqrt(total / probes)


def normalised_11_norm(norm: float, frobenius_norm: float, dimension: int) -> float:
    """The (1,1)-norm of a Hessian of `dimension` d parameters over sqrt(d) times its Frobenius norm, without unit: our normalisation.

    Between 1 / sqrt(d) (a single entry) and sqrt(d) (all entries of one size). In a basis where the Hessian is diagonal it is at most 1
    (reached when all eigenvalues have one size), so a larger value proves misalignment. Published normalised values may have been
    divided by something else (such as d), but the ratio of two bases is the same under any division. 0 for a zero Hessian.
    """
    return norm / (math.sqrt(dimension) * frobenius_norm) if frobenius_norm else 0.0


def summary(values: Mapping[str, float]) -> dict[str, float]:
    """`mean` and `max` of one number per matrix, for monitor events `Train/Samples/basis_rotation/<metric>`; empty without matrices."""
    if not values:
        return {}
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    return {"mean": float(numbers.mean()), "max": float(numbers.max())}


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _unit_scale(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`tensor` divided by its largest magnitude over `dims`, so that squares neither overflow nor vanish; zero stays zero."""
    largest = tensor.abs().amax(dims, keepdim=True)
    return tensor / torch.where(largest == 0, 1.0, largest)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where both are 0."""
    return part / torch.where(whole == 0, 1.0, whole)


def _in_basis(covariance: Tensor, basis: Tensor | None) -> Tensor:
    """U^T C U of the covariance in units of its largest element."""
    covariance = _unit_scale(_at_least_float32(covariance), (-2, -1))
    if basis is None:
        return covariance
    basis = basis.to(covariance.dtype)
    return basis.mT @ covariance @ basis


def _without_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def _to_rotated(matrix: Tensor, pair: Pair) -> Tensor:
    """U^T X V."""
    left, right = pair
    matrix = matrix if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right


def _to_standard(matrix: Tensor, pair: Pair) -> Tensor:
    """U X V^T."""
    left, right = pair
    matrix = matrix if left is None else left @ matrix
    return matrix if right is None else matrix @ right.mT


def _checked_pair(p: Tensor, pair: Pair) -> Pair:
    """The bases of a parameter in its dtype."""
    for dim, basis in zip((-2, -1), pair):
        if basis is not None and (p.ndim < 2 or basis.shape != (*p.shape[:-2], p.shape[dim], p.shape[dim])):
            raise ValueError(
                f"bases: {list(basis.shape)} does not fit a parameter of shape {list(p.shape)}: "
                "pass (U or None, V or None) with U [..., m, m] and V [..., n, n] for [..., m, n]"
            )
    return tuple(None if basis is None else basis.detach().to(p) for basis in pair)


def _hessian_product(loss_fn: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """v -> H v, both as one tensor per parameter, by differentiating the gradient of one evaluation of the loss."""
    if not parameters:
        raise ValueError("parameters: there are none; pass those the Hessian is taken with respect to")
    for p in parameters:
        if p.dtype not in (torch.float32, torch.float64) or not p.requires_grad:
            raise ValueError(
                f"parameters: one of shape {list(p.shape)} has dtype {p.dtype} and requires_grad={p.requires_grad}: "
                "second derivatives need float32 or float64 parameters that require gradients; convert a copy of the model"
            )
    accelerators = {p.device for p in parameters if p.device.type != "cpu"}
    kind = next(iter(accelerators)).type if accelerators else "cuda"
    with torch.enable_grad(), torch.random.fork_rng(list(accelerators), device_type=kind), sdpa_kernel(SDPBackend.MATH):
        loss = loss_fn()
        if not torch.is_tensor(loss) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError("loss_fn: must return a scalar tensor computed from the parameters with gradients enabled")
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    curved = [i for i, gradient in enumerate(gradients) if gradient.requires_grad]

    def product(vectors: list[Tensor]) -> Sequence[Tensor]:
        if not curved:
            return [torch.zeros_like(p) for p in parameters]
        outputs, weights = [gradients[i] for i in curved], [vectors[i] for i in curved]
        return torch.autograd.grad(outputs, parameters, weights, retain_graph=True, materialize_grads=True)

    return product


def _unbiased_geometric_mean(logs: Tensor, counts: Tensor) -> Tensor:
    """Scales of Cauchy samples from the sums of the logarithms of their magnitudes; 0 for fewer than two samples."""
    n = counts.clamp_min(2).double()
    return torch.where(counts > 1, torch.exp(logs / n) * torch.cos(math.pi / (2 * n)) ** n, 0.0)
