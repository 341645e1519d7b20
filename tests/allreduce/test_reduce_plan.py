# SPDX-License-Identifier: Apache-2.0
"""Launch plans of the fused all-reduce: a thread per vector, co-resident CTAs where they wait."""

from __future__ import annotations

import pytest

from weft.allreduce.kernels import plan_oneshot, plan_resident, plan_twoshot
from weft.errors import InvalidArgument

SMS = 132


def resident(threads: int, cluster: int) -> int:
    """Return how many CTAs with 104 registers an H200 holds."""
    return SMS * min(2048 // threads, 65536 // (threads * 104)) // cluster * cluster


@pytest.mark.parametrize("vectors", [1, 31, 33, 360, 512, 896, 1024, 1792, 4096])
@pytest.mark.parametrize("tokens", [1, 3, 8, 32, 128])
def test_one_shot_has_a_thread_for_every_vector(vectors, tokens):
    p = plan_oneshot(tokens, vectors, 8, sms=SMS, max_resident_ctas=resident)
    assert p.ctas == tokens * p.cluster
    assert p.threads % 32 == 0
    assert p.threads <= 512
    assert 1 <= p.cluster <= 8
    assert vectors <= p.threads * p.cluster < vectors + 32 * p.cluster + p.threads
    assert p.cluster == 8 or vectors > 32 * p.cluster * (p.threads // 32 - 1)


@pytest.mark.parametrize("vectors", [1, 33, 360, 512, 896, 1792, 4096])
@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 500, 2048])
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("pieces", [1, 2])
def test_twoshot_fits_on_the_gpu_at_once(vectors, tokens, ranks, pieces):
    p = plan_twoshot(tokens, vectors, ranks, pieces=pieces, max_resident_ctas=resident)
    assert vectors <= p.threads * p.cluster * pieces
    assert p.ctas <= resident(p.threads, p.cluster)
    assert p.pushers % p.cluster == p.ctas % p.cluster == 0
    assert p.cluster <= p.pushers <= p.ctas - p.cluster


@pytest.mark.parametrize("vectors", [640, 896, 1792, 4096])
def test_a_resident_oneshot_fits_on_the_gpu_at_once(vectors):
    for tokens in (67, 131, 512):
        p = plan_resident(tokens, vectors, 8, pieces=2, max_resident_ctas=resident)
        assert vectors <= 2 * p.threads * p.cluster
        assert p.ctas % p.cluster == 0
        assert p.cluster <= p.ctas <= min(tokens * p.cluster, resident(p.threads, p.cluster))
        assert p.cluster == (1 if vectors <= 1024 else -(-vectors // 1024))


def test_a_gpu_with_power_of_two_clusters_only():
    def picky(threads: int, cluster: int) -> int:
        return resident(threads, cluster) if cluster in (1, 2, 4, 8) else 0

    assert plan_oneshot(1, 896, 8, sms=SMS, max_resident_ctas=picky).cluster == 8
    for pieces in (1, 2):
        p = plan_twoshot(64, 896, 8, pieces=pieces, max_resident_ctas=picky)
        assert p.cluster == (8 if pieces == 1 else 1)
        assert p.threads * p.cluster * pieces >= 896


def test_a_gpu_without_such_clusters_is_named():
    with pytest.raises(InvalidArgument, match="a row of 14336 bytes does not fit a cluster"):
        plan_oneshot(1, 896, 8, sms=SMS, max_resident_ctas=lambda threads, cluster: 0)
    with pytest.raises(InvalidArgument, match="does not fit a cluster of this GPU"):
        plan_resident(67, 896, 8, pieces=2, max_resident_ctas=lambda threads, cluster: 0)
    with pytest.raises(InvalidArgument, match="does not fit a cluster of this GPU"):
        plan_twoshot(1, 896, 8, pieces=1, max_resident_ctas=lambda threads, cluster: 0)


@pytest.mark.parametrize("vectors", [1, 16, 896, 4096])
@pytest.mark.parametrize("ranks", [33, 34, 65, 66, 72])
def test_a_cta_has_a_thread_for_every_peer(vectors, ranks):
    plans = [
        plan_oneshot(3, vectors, ranks, sms=SMS, max_resident_ctas=resident),
        plan_resident(300, vectors, ranks, pieces=2, max_resident_ctas=resident),
        *(plan_twoshot(100, vectors, ranks, pieces=p, max_resident_ctas=resident) for p in (1, 2)),
    ]
    assert all(plan.threads >= ranks - 1 for plan in plans)
    assert all(plan.threads <= 512 for plan in plans)
