"""Callables that return an iterable: slices, skipping, draws, and what is refused."""

import itertools
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest

from megascale_lightning.errors import ConfigError, DataError, MegaScaleWarning
from megascale_lightning.sources import Source, build_manifest, make_reader

EPOCH = (0, "train", 0)


def manifest_of(source, **settings):
    with pytest.warns(MegaScaleWarning, match="'s' is an iterable: a resume"):
        return build_manifest(source, **settings)


def reader_of(factory, **options):
    source = Source("s", factory, format_options=options)
    return make_reader(source, manifest_of(source), None)


def records_of(reader, epoch=EPOCH, count=None):
    found, index, is_last = [], 0, False
    while not is_last and (count is None or index < count):
        block, is_last = reader.read_epoch_slice(0, index, 1 << 20, epoch)
        assert block.row_start == len(found)
        found += block.objects
        index += 1
    return found


def numbers():
    yield from range(2500)


def test_slices_are_numbers_of_records():
    source = Source("s", numbers)
    manifest = manifest_of(source)
    assert (manifest.format, manifest.sliced, manifest.num_units, manifest.num_records) == ("iterable", True, 1, -1)
    reader = make_reader(source, manifest, None)
    sizes = [reader.read_slice(0, index, 7) for index in range(3)]
    assert [(block.num_rows, is_last) for block, is_last in sizes] == [(1024, False), (1024, False), (452, True)]
    assert records_of(reader) == list(range(2500))
    with pytest.raises(IndexError):
        reader.read_slice(0, 3, 7)
    assert reader.read(0, 2000, 2100).objects == list(range(2000, 2100))
    assert reader.read(0, 2490).objects == list(range(2490, 2500))


@pytest.mark.parametrize("total", [0, 1, 9, 10, 11, 20])
def test_any_number_of_records(total):
    reader = reader_of(lambda: iter(range(total)), slice_records=10)
    assert records_of(reader) == list(range(total))


def test_going_on_takes_each_record_once_and_going_back_starts_over():
    log = []

    def factory():
        log.append("made")
        for index in range(100):
            log.append(index)
            yield index

    reader = reader_of(factory, slice_records=10)
    log.clear()
    records_of(reader, count=3)
    assert log == ["made", *range(30)]
    reader.read_epoch_slice(0, 1, 0, EPOCH)
    assert log == ["made", *range(30), "made", *range(20)]
    reader.read_epoch_slice(0, 4, 0, EPOCH)
    assert log[-20:] == list(range(30, 50)), "the one that is nearest goes on"
    reader.read_epoch_slice(0, 0, 0, (0, "train", 1))
    assert log[-11:] == ["made", *range(10)], "the next epoch is another iterator"


def test_an_endless_iterable():
    reader = reader_of(itertools.count, slice_records=4)
    assert records_of(reader, count=5) == list(range(20))


def test_generators_are_closed():
    log = []

    def factory():
        try:
            yield from range(100)
        finally:
            log.append("closed")

    reader = reader_of(factory, slice_records=5)
    records_of(reader, count=1)
    reader.close()
    assert log == ["closed"]
    assert records_of(reader, count=1) == list(range(5)), "and reading is fine afterwards"
    reader.close()


def drawing():
    for _ in range(60):
        yield random.random(), float(np.random.random())  # noqa: NPY002


class TestDraws:
    def test_skipping_draws_the_same(self):
        alone = records_of(reader_of(drawing, slice_records=10))
        assert len(set(alone)) == 60
        restarted = reader_of(drawing, slice_records=10)
        block, _ = restarted.read_epoch_slice(0, 4, 0, EPOCH)
        assert block.objects == alone[40:50]

    def test_others_do_not_disturb(self):
        alone = records_of(reader_of(drawing, slice_records=10))
        reader = reader_of(drawing, slice_records=10)
        found = []
        for index in range(6):
            random.seed(index)
            np.random.seed(index)  # noqa: NPY002
            before = random.getstate()
            found += reader.read_epoch_slice(0, index, 0, EPOCH)[0].objects
            assert random.getstate() == before, "the user's own generator is left alone"
            reader.read_epoch_slice(0, index, 0, (0, "train", 1))
        assert found == alone

    def test_seed_stream_and_epoch_matter(self):
        reader = reader_of(drawing, slice_records=10)
        keys = [(0, "train", 0), (0, "train", 1), (0, "val/0", 0), (1, "train", 0)]
        assert len({records_of(reader, key)[0] for key in keys}) == 4

    def test_epochs_do_not_mix(self):
        second = (0, "train", 1)
        alone = records_of(reader_of(drawing, slice_records=10), second)
        reader = reader_of(drawing, slice_records=10)
        reader.read_epoch_slice(0, 0, 0, EPOCH)
        reader.read_epoch_slice(0, 1, 0, EPOCH)
        assert reader.read_epoch_slice(0, 2, 0, second)[0].objects == alone[20:30]

    def test_a_callable_that_draws_at_once(self):
        def shuffled():
            return iter(random.sample(range(100), 100))

        before = random.getstate()
        one, two = reader_of(shuffled, slice_records=10), reader_of(shuffled, slice_records=10)
        assert records_of(one) == records_of(two)
        assert records_of(one) != records_of(one, (0, "train", 1))
        assert random.getstate() == before, "the user's own generator is left alone"

    @pytest.mark.slow
    def test_torch_that_comes_in_between(self):
        """The first process imports torch within the iterable, the second has it before: they draw the same."""
        code = """
            import sys, warnings
            warnings.simplefilter("ignore")
            if sys.argv[1] == "before":
                import torch
            from megascale_lightning.sources import Source, build_manifest, make_reader
            def factory():
                yield 0
                import torch
                for _ in range(5):
                    yield torch.rand(()).item()
            source = Source("s", factory, format_options={"slice_records": 2})
            reader = make_reader(source, build_manifest(source), None)
            assert ("torch" in sys.modules) == (sys.argv[1] == "before")
            print([reader.read_epoch_slice(0, index, 0, (0, "train", 0))[0].objects for index in range(3)])
        """
        outs = [
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(code), when], capture_output=True, text=True, check=True
            ).stdout
            for when in ("before", "within")
        ]
        assert outs[0] == outs[1]
        assert outs[0].startswith("[[0, 0.")


def test_threads_share_a_reader():
    reader = reader_of(numbers, slice_records=50)
    found = {}

    def work(number):
        found[number] = records_of(reader, (0, "train", number % 2))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] == list(range(2500)) for number in range(4)] == [True] * 4


def test_an_error_names_source_and_record():
    def factory():
        yield from range(13)
        raise KeyError("shard 7")

    reader = reader_of(factory, slice_records=10)
    reader.read_slice(0, 0, 0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"source 's': its iterable failed at record 13: KeyError: 'shard 7'"):
            reader.read_slice(0, 1, 0)


def test_sys_exit_is_an_error():
    def factory():
        yield 1
        sys.exit(3)

    with pytest.raises(DataError, match="record 1: SystemExit"):
        reader_of(factory).read_slice(0, 0, 0)


class Panic(BaseException):
    """As libraries written in Rust raise it."""


def test_a_panic_names_source_and_record():
    def factory():
        yield 1
        raise Panic("index out of bounds")

    with pytest.raises(DataError, match="source 's': its iterable failed at record 1: Panic: index out of bounds"):
        reader_of(factory).read_slice(0, 0, 0)


@pytest.mark.parametrize("form", [None, "iterable", "dataset"])
@pytest.mark.parametrize("error", [Panic("gone"), OSError("gone")])
def test_a_callable_that_fails_names_the_source(form, error):
    def factory():
        raise error

    with pytest.raises(DataError, match=rf"source 's': its callable '.*factory' failed: {type(error).__name__}: gone"):
        build_manifest(Source("s", factory, format=form))


class TestRecognised:
    def format_of(self, data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MegaScaleWarning)
            return build_manifest(Source("s", data)).format

    def test_what_a_callable_returns_tells(self):
        calls = []
        assert self.format_of(lambda: calls.append(1) or [{"a": 1}]) == "dataset"
        assert calls == [1]
        assert self.format_of(lambda: iter([1])) == "iterable"
        assert self.format_of(numbers) == "iterable"
        assert self.format_of([{"a": 1}]) == "dataset"

    def test_torch_iterable_datasets(self):
        """torch gives them `__getitem__`, and users often give them `__len__`."""
        data = pytest.importorskip("torch.utils.data")

        class Streamed(data.IterableDataset):
            def __len__(self):
                return 5

            def __iter__(self):
                return iter(range(5))

        class Mapped(data.Dataset):
            def __len__(self):
                return 5

            def __getitem__(self, index):
                return index

        assert self.format_of(Streamed) == "iterable"
        assert self.format_of(lambda: Streamed()) == "iterable"
        assert records_of(reader_of(Streamed)) == [0, 1, 2, 3, 4]
        assert self.format_of(Mapped) == "dataset"
        assert self.format_of(Mapped()) == "dataset"
        with pytest.raises(ConfigError, match=r"data is a Streamed, an iterable; .* lambda: Streamed\(\.\.\.\)"):
            self.format_of(Streamed())

    def test_hugging_face_streams(self):
        hf = pytest.importorskip("datasets")

        def stream():
            return hf.Dataset.from_dict({"a": [1, 2, 3]}).to_iterable_dataset()

        assert self.format_of(stream) == "iterable"
        assert records_of(reader_of(stream)) == [{"a": 1}, {"a": 2}, {"a": 3}]
        with pytest.raises(ConfigError, match="IterableDataset, an iterable"):
            self.format_of(stream())

    @pytest.mark.parametrize(
        "data", [iter([1]), (x for x in [1]), {1, 2}, map(str, [1])], ids=["list", "gen", "set", "map"]
    )
    def test_iterables_themselves_are_refused(self, data):
        with pytest.raises(ConfigError, match=r"give a callable without arguments that returns a new one"):
            build_manifest(Source("s", data))
        with pytest.raises(ConfigError, match=r"give a callable without arguments that returns a new one"):
            build_manifest(Source("s", data, format="iterable"))

    @pytest.mark.parametrize("data", [lambda: 5, 5, lambda: None], ids=["number", "plain", "none"])
    def test_what_is_neither_is_refused(self, data):
        with pytest.raises(ConfigError, match=r"'s': a (int|NoneType) is neither a dataset"):
            build_manifest(Source("s", data))

    def test_an_iterator_that_was_made_before_is_refused(self):
        once = iter(range(5))
        with pytest.raises(ConfigError, match="'s': the callable returns the same range_iterator each time"):
            build_manifest(Source("s", lambda: once))
        generator = numbers()
        with pytest.raises(ConfigError, match="returns the same generator each time"):
            build_manifest(Source("s", lambda: generator, format="iterable"))
        assert next(once) == 0, "nothing was taken"

    def test_format_iterable_takes_any_iterable(self):
        source = Source("s", lambda: [7, 8], format="iterable")
        assert records_of(make_reader(source, manifest_of(source), None)) == [7, 8]
        with pytest.raises(ConfigError, match="returned a int, which is no iterable"):
            build_manifest(Source("s", lambda: 5, format="iterable"))

    def test_options(self):
        for options, message in (({"slices": 1}, "it has slice_records"), ({"slice_records": 0}, "at least 1")):
            with pytest.raises(ConfigError, match=message):
                build_manifest(Source("s", numbers, format_options=options))

    def test_it_must_pickle_where_others_read_it(self):
        lock = threading.Lock()
        source = Source("s", lambda: iter([lock]))
        manifest_of(source)
        with pytest.raises(ConfigError, match="does not pickle"):
            build_manifest(source, portable=True, dump=pickle.dump)
        manifest_of(Source("s", numbers), portable=True)
