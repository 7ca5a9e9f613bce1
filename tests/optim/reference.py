"""The slow, obvious twin of BasisRotation: float64, one matrix at a time, momentum kept unrotated."""

import math

import torch


class ReferenceMatrix:
    """Adam in a rotated basis for one weight `[m, n]`; plain Adam when `rotated` is False. Follows the update rule line by line.

    Attributes:
        path: length of the way the weight has gone.
        nearest_tie: smallest difference of two columns' scores at a refresh, relative to the largest score: rounding errors of that size
            exchange the two.
    """

    def __init__(
        self,
        weight,
        *,
        lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        geometry="bilateral",
        auto_budget=4.0,
        source="second_order",
        refresh_period=10,
        refresh_offset=0,
        covariance_beta=None,
        rotated=True,
        noise_floor=0.0,
        covariance_damping=0.0,
    ):
        self.w = weight.detach().double().clone()
        self.lr, (self.b1, self.b2), self.eps, self.wd = lr, betas, eps, weight_decay
        self.source, self.period, self.offset = source, refresh_period, refresh_offset
        self.bc = self.b2 if covariance_beta is None else covariance_beta
        self.noise_floor, self.damping = noise_floor, covariance_damping
        m, n = weight.shape if weight.ndim == 2 else (0, 0)
        both = geometry == "bilateral" or (geometry == "auto" and max(m, n) / auto_budget < min(m, n))
        self.left = rotated and (both or m < n)
        self.right = rotated and (both or m >= n)
        self.rotated = self.left or self.right
        self.t, self.refreshes, self.path, self.nearest_tie = 0, 0, 0.0, 1.0
        self.M, self.S = torch.zeros_like(self.w), torch.zeros_like(self.w)
        self.L, self.R, self.U, self.V = 0.0, 0.0, None, None

    def step(self, grad):
        g = grad.detach().double()
        self.t += 1
        if self.rotated and self.source == "second_order":
            self.L = self.bc * self.L + (1 - self.bc) * g @ g.T
            self.R = self.bc * self.R + (1 - self.bc) * g.T @ g
        if self.rotated and self.t == 1:
            self.U, self.V = first_bases(g, tolerance=max(self.noise_floor / 10, 3e-6))
        elif self.rotated and (self.t + self.offset) % self.period == 0:
            self._refresh()
            self.refreshes += 1
        self.M = self.b1 * self.M + (1 - self.b1) * g
        g_rot, m_rot = self._rotate(g), self._rotate(self.M)
        self.S = self.b2 * self.S + (1 - self.b2) * g_rot**2
        if self.rotated:
            denominator = self.S.sqrt().clamp_min(self.noise_floor * self.S.mean().sqrt()) + self.eps
            update = math.sqrt(1 - self.b2**self.t) / (1 - self.b1**self.t) * m_rot / denominator
        else:
            update = m_rot / (1 - self.b1**self.t) / ((self.S / (1 - self.b2**self.t)).sqrt() + self.eps)
        if self.left:
            update = self.U @ update
        if self.right:
            update = update @ self.V.T
        before, self.w = self.w, (1 - self.lr * self.wd) * self.w - self.lr * update
        self.path += (self.w - before).norm().item()
        return self.w

    def _rotate(self, x):
        if self.left:
            x = self.U.T @ x
        if self.right:
            x = x @ self.V
        return x

    def _refresh(self):
        left, right = (self.L, self.R) if self.source == "second_order" else (self.M @ self.M.T, self.M.T @ self.M)
        if self.left:
            self.U, order = self._power_step(left, self.U)
            self.S = self.S[order]
        if self.right:
            self.V, order = self._power_step(right, self.V)
            self.S = self.S[:, order]

    def _power_step(self, covariance, basis):
        scores = (basis.T @ covariance @ basis).diagonal()
        order = by_descending(scores)
        gaps = scores[order][:-1] - scores[order][1:]
        self.nearest_tie = min([self.nearest_tie, *(gaps / scores.max()).tolist()])
        damped = covariance + self.damping * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
        return gram_schmidt(damped @ basis[:, order]), order


class ReferenceFused:
    """A weight of `groups` groups of blocks of rows, in which the blocks of one kind are one matrix."""

    def __init__(self, weight, *, rows, groups=1, **config):
        self.w = weight.detach().double().clone()
        group_rows = len(weight) // groups
        self.rows, first = [], 0
        for block in rows:
            self.rows.append([group * group_rows + row for group in range(groups) for row in range(first, first + block)])
            first += block
        self.parts = [ReferenceMatrix(weight[its], **config) for its in self.rows]

    def step(self, grad):
        for its, part in zip(self.rows, self.parts):
            self.w[its] = part.step(grad[its])
        return self.w


def first_bases(gradient, tolerance):
    """U, V: the gradient's singular vectors; where singular values are small against `tolerance`, what a fixed random frame has there."""
    u, singular_values, vt = torch.linalg.svd(gradient)
    weights = [1 / (1 + (tolerance * singular_values[0] / s) ** 4) if s > 0 else 0.0 for s in singular_values]
    return blended_with_frame(u, weights), blended_with_frame(vt.T, weights)


def blended_with_frame(vectors, weights):
    side = len(vectors)
    frame = torch.randn(side, side, generator=torch.Generator().manual_seed(side), dtype=torch.float64)
    for i, weight in enumerate(weights):
        v, f = vectors[:, i], frame[:, i].clone()
        frame[:, i] = weight * (v @ f) * v + (1 - weight) * f
    return gram_schmidt(frame)


def by_descending(scores):
    return torch.argsort(scores, descending=True, stable=True)


def gram_schmidt(columns):
    """Gram-Schmidt, twice for accuracy: the textbook form of what QR computes."""
    q = columns.clone()
    for _ in range(2):
        for j in range(q.shape[1]):
            q[:, j] -= q[:, :j] @ (q[:, :j].T @ q[:, j])
            q[:, j] /= q[:, j].norm()
    return q
