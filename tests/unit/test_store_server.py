"""The store forgets the keys of generations that are over, and nothing else."""

from __future__ import annotations

from torch.distributed import PrefixStore, TCPStore

from flashrecovery.agent.stores.store_server import Sweep


def meet(store: TCPStore, generation: int) -> None:
    for rank in range(3):
        PrefixStore(f"fr/gen{generation}/0/", store).set(f"rank{rank}", "addresses")


def generations(store: TCPStore) -> list[str]:
    return sorted({key.split("/")[1] for key in store.list_keys() if key.startswith("fr/")})


def test_what_nobody_can_ask_for_any_more_is_forgotten() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sweep = Sweep(store)
    store.set("attempt_0/the script's", "own")
    store.set("fr/start0/0/", "of the start")
    sizes = []
    for generation in range(1, 31):
        meet(store, generation)
        sweep()
        sizes.append(store.num_keys())
    assert max(sizes) <= 2 + 2 * 3 and generations(store) == ["gen29", "gen30", "start0"], "it grows with recoveries"
    sweep()
    assert generations(store) == ["gen30", "start0"] and store.get("attempt_0/the script's") == b"own"


def test_it_looks_only_where_something_has_changed() -> None:
    class Counted:
        lists = 0

        def num_keys(self) -> int:
            return 1

        def list_keys(self) -> list[str]:
            self.lists += 1
            return ["fr/gen7/0/x"]

        def delete_key(self, key: str) -> bool:
            raise AssertionError(key)

    store = Counted()
    sweep = Sweep(store)
    for _ in range(5):
        sweep()
    assert store.lists == 2
