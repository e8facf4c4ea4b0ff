"""Repeated write slots: which ones are found, and the count of them."""

from __future__ import annotations

import threading

import torch

from sdm_compile.ops.repeats import add_repeats, first_places, merge_repeated, repeated_write_slots


def count_repeated(k_idx: torch.Tensor) -> None:
    add_repeats(merge_repeated(k_idx, torch.ones(k_idx.shape), torch.zeros(*k_idx.shape[:-1], 1))[-1])


def test_first_places() -> None:
    ids = torch.tensor([[4, 4, 2, 4], [1, 2, 3, 0], [-1, -1, 5, -1], [7, 7, 7, 7], [0, -1, 0, -1]])
    assert first_places(ids).tolist() == [[0, 0, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 0, 3]]


def test_first_places_of_many_writes() -> None:
    ids = torch.randint(-3, 90, (50, 256), generator=torch.Generator().manual_seed(0))
    expected = [[row.index(i) if i >= 0 else w for w, i in enumerate(row)] for row in ids.tolist()]
    assert first_places(ids).tolist() == expected


def test_counts_add_up_until_they_are_reset() -> None:
    repeated_write_slots()
    count_repeated(torch.tensor([[3, 3, 3], [-1, -1, 2]]))
    assert repeated_write_slots(reset=False) == 2
    count_repeated(torch.tensor([5, 5], dtype=torch.int32))
    assert repeated_write_slots() == 3
    assert repeated_write_slots() == 0
    count_repeated(torch.empty(0, 4, dtype=torch.int64))
    assert repeated_write_slots() == 0


def test_counting_goes_on_in_and_out_of_inference_mode() -> None:
    repeated_write_slots()
    with torch.inference_mode():
        count_repeated(torch.tensor([1, 1]))
    count_repeated(torch.tensor([1, 1]))
    assert repeated_write_slots() == 2
    with torch.inference_mode():
        assert repeated_write_slots() == 0


def test_threads_count_together() -> None:
    repeated_write_slots()

    def count() -> None:
        for _ in range(50):
            count_repeated(torch.tensor([1, 1]))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert repeated_write_slots() == 200
