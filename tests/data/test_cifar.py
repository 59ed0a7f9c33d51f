"""CIFAR files, assembled instruction by instruction as Python 2 and Python 3 write them, and malicious ones."""

import contextlib
import hashlib
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrane.data import catalogue, cifar
from fedrane.errors import DataError

REMEDY = "Delete the file and run `fedrane data get cifar10`"

# The file of the original archive, whose published MD5 it has.
BATCHES_META = (
    b"\x80\x02}q\x01(U\x13num_cases_per_batchq\x02M\x10'U\x0blabel_namesq\x03]q\x04(U\x08airplaneq\x05U\nautomobileq\x06"
    b"U\x04birdq\x07U\x03catq\x08U\x04deerq\tU\x03dogq\nU\x04frogq\x0bU\x05horseq\x0cU\x04shipq\rU\x05truckq\x0e"
    b"eU\x07num_visq\x0fM\x00\x0cu."
)

TWO, THREE = "as Python 2 writes", "as Python 3 writes"
both = pytest.mark.parametrize("python", [TWO, THREE])


def text(python, value):
    """SHORT_BINSTRING length bytes, or BINUNICODE length utf-8."""
    raw = value.encode()
    return b"U" + bytes([len(raw)]) + raw if python is TWO else b"X" + struct.pack("<I", len(raw)) + raw


def octets(python, raw):
    """BINSTRING length bytes, or the call of _codecs.encode on the bytes as text: GLOBAL … TUPLE2 REDUCE."""
    if python is TWO:
        return b"T" + struct.pack("<I", len(raw)) + raw
    as_text = raw.decode("latin1").encode("utf-8")
    return b"c_codecs\nencode\nX" + struct.pack("<I", len(as_text)) + as_text + text(THREE, "latin1") + b"\x86R"


def dtype(python, code="u1"):
    """GLOBAL numpy.dtype, its arguments, REDUCE; then its state, BUILD."""
    numbers = b"K\x00K\x01" if python is TWO else b"\x89\x88"
    state = b"(K\x03" + text(python, "|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
    return b"cnumpy\ndtype\n" + text(python, code) + numbers + b"\x87R" + state + b"b"


def array(python, examples, columns, raw, code="u1", order=b"\x89"):
    """GLOBAL _reconstruct of (ndarray, (0,), b"b"), REDUCE; then (1, shape, dtype, order, bytes), BUILD."""
    module = b"numpy.core.multiarray" if python is TWO else b"numpy._core.multiarray"
    letter = text(TWO, "b") if python is TWO else octets(THREE, b"b")
    made = b"c" + module + b"\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + letter + b"\x87R"
    shape = b"J" + struct.pack("<i", examples) + b"J" + struct.pack("<i", columns) + b"\x86"
    return made + b"(K\x01" + shape + dtype(python, code) + order + octets(python, raw) + b"tb"


def integers(values):
    """EMPTY_LIST, MARK, BININT1 …, APPENDS."""
    return b"]q\x05(" + b"".join(b"K" + bytes([value]) for value in values) + b"e"


def dictionary(python, **items):
    """PROTO 2, EMPTY_DICT, MARK, key value …, SETITEMS, STOP."""
    return b"\x80\x02}q\x01(" + b"".join(text(python, key) + value for key, value in items.items()) + b"u."


def image(number):
    """3072 bytes in the order of the format (red, green, blue), which identify their position."""
    return bytes(
        (channel * 80 + row * 2 + column + number) % 256
        for channel in range(3)
        for row in range(32)
        for column in range(32)
    )


PIXELS = image(0) + image(7)


def batch(python, labels=(6, 9), key="labels", data=None, **more):
    stored = array(python, 2, 3072, PIXELS) if data is None else data
    return dictionary(
        python, batch_label=text(python, "training batch 1 of 5"), **{key: integers(labels)}, data=stored, **more
    )


def read(path, content, key="labels", classes=10):
    path.write_bytes(content)
    return cifar.read(path, key, classes, REMEDY)


def refused(path, content, **how):
    with pytest.raises(DataError) as caught:
        read(path, content, **how)
    assert str(path) in str(caught.value)
    assert caught.value.remedy == REMEDY
    return str(caught.value)


@both
def test_a_batch_is_read_with_channels_rows_and_columns_in_order(tmp_path, python):
    x, y = read(tmp_path / "data_batch_1", batch(python))
    assert (x.dtype, x.shape, y.dtype, y.tolist()) == (np.uint8, (2, 3, 32, 32), np.int64, [6, 9])
    for row, column in ((0, 0), (0, 31), (31, 0), (5, 17)):
        assert x[0, :, row, column].tolist() == [(channel * 80 + row * 2 + column) % 256 for channel in range(3)]
    assert x[1, 2, 3, 4] == 160 + 6 + 4 + 7


def test_what_is_assembled_here_is_what_pickle_writes_and_reads():
    ours = pickle.loads(batch(THREE))
    assert ours["data"].tobytes() == PIXELS
    assert ours["labels"] == [6, 9]


@both
def test_an_array_stored_column_by_column_is_read_the_same(tmp_path, python):
    by_columns = np.frombuffer(PIXELS, np.uint8).reshape(2, 3072).tobytes(order="F")
    x, _ = read(tmp_path / "batch", batch(python, data=array(python, 2, 3072, by_columns, order=b"\x88")))
    assert x.tobytes() == PIXELS


def test_single_items_and_memo_references_are_read(tmp_path):
    # SETITEM and APPEND one by one, and a label from the memo with BINGET, as cPickle writes short remainders.
    content = b"\x80\x02}" + text(TWO, "data") + array(TWO, 2, 3072, PIXELS) + b"s"
    content += text(TWO, "labels") + b"]K\x04q\x07ah\x07as."
    assert read(tmp_path / "batch", content)[1].tolist() == [4, 4]


def test_the_original_names_are_read(tmp_path):
    assert hashlib.md5(BATCHES_META, usedforsecurity=False).hexdigest() == "5ff9c542aee3614f3951f8cda6e48888"
    (tmp_path / "batches.meta").write_bytes(BATCHES_META)
    names = cifar.names(tmp_path / "batches.meta", "label_names", 10, REMEDY)
    assert names == catalogue.KNOWN["cifar10"].classes
    with pytest.raises(DataError, match="100 names"):
        cifar.names(tmp_path / "batches.meta", "label_names", 100, REMEDY)


def test_a_truncated_file_is_rejected(tmp_path):
    whole = batch(TWO)
    for length in [*range(200), *range(200, len(whole), 97), len(whole) - 1]:
        refused(tmp_path / "batch", whole[:length])


@pytest.mark.parametrize("labels", [[6], [6, 9, 1], [6, 10], [6, 255]], ids=["fewer", "more", "ten", "large"])
def test_inconsistent_labels_are_rejected(tmp_path, labels):
    assert "labels" in refused(tmp_path / "batch", batch(TWO, labels))


@pytest.mark.parametrize(
    "labels",
    [b"N", b"]" + text(TWO, "cat") + b"aK\x01a", b"]\x88aK\x01a", b"]J\xff\xff\xff\xffaK\x01a"],
    ids=["none", "names", "true", "negative"],
)
def test_labels_of_another_type_are_rejected(tmp_path, labels):
    content = dictionary(TWO, labels=labels, data=array(TWO, 2, 3072, PIXELS))
    assert "labels" in refused(tmp_path / "batch", content)


@both
@pytest.mark.parametrize(
    ("examples", "columns"), [(3, 3072), (1, 3072), (3072, 2), (1, 6144), (-2, -3072), (2**31 - 1, 2**31 - 1)]
)
def test_an_array_of_another_shape_is_rejected(tmp_path, python, examples, columns):
    tracemalloc.start()
    refused(tmp_path / "batch", batch(python, data=array(python, examples, columns, PIXELS)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # a shape is only compared, never allocated


def test_a_text_is_not_encoded_a_thousand_times(tmp_path):
    once = octets(THREE, bytes(100_000))[:-1] + b"q\x06"  # the arguments, with a number in the memo
    content = b"\x80\x02](c_codecs\nencode\nq\x05" + once[len(b"c_codecs\nencode\n") :] + b"R"
    content += b"h\x05h\x06R" * 1000 + b"e."
    tracemalloc.start()
    assert "more arrays than it has bytes for" in refused(tmp_path / "batch", content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@both
@pytest.mark.parametrize("kind", ["O", "O8", "i8", "V3072"])
def test_an_array_of_another_dtype_is_rejected(tmp_path, python, kind):
    message = refused(tmp_path / "batch", batch(python, data=array(python, 2, 3072, PIXELS, kind)))
    assert f"refused: the file asks for an array of type {kind!r}" in message


def test_an_array_that_was_never_filled_is_rejected(tmp_path):
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    assert "no images" in refused(tmp_path / "batch", batch(TWO, data=made))


def hostile(marker):
    """Pickles that would leave a trace, by every instruction that calls something."""
    command, code = text(THREE, f"touch {marker}"), text(THREE, f"open({str(marker)!r}, 'w')")
    getter = b"c__builtin__\ngetattr\n"
    return {
        "system": (b"\x80\x02cposix\nsystem\n" + command + b"\x85R.", "posix.system"),
        "os": (b"\x80\x02cos\nsystem\n" + command + b"\x85R.", "os.system"),
        "eval": (b"\x80\x02c__builtin__\neval\n" + code + b"\x85R.", "__builtin__.eval"),
        "builtins": (b"\x80\x03cbuiltins\neval\n" + code + b"\x85R.", "builtins.eval"),
        "nested": (
            b"\x80\x02" + getter + b"c__builtin__\n__import__\nU\x02os\x85RU\x06system\x86R" + command + b"\x85R.",
            "__builtin__.getattr",
        ),
        "inst": (b"(" + command + b"iposix\nsystem\n.", "posix.system"),
        "obj": (b"(cposix\nsystem\n" + command + b"o.", "posix.system"),
        "stack global": (
            b"\x80\x04" + text(THREE, "posix") + text(THREE, "system") + b"\x93" + command + b"\x85R.",
            "STACK_GLOBAL",
        ),
        "new object": (b"\x80\x02cnumpy\nndarray\nK\x00\x85\x85\x81.", "NEWOBJ"),
        "persistent": (b"\x80\x02U\x01aQ.", "BINPERSID"),
        "extension": (b"\x80\x02\x82\x01.", "EXT1"),
    }


@pytest.mark.parametrize("way", hostile("marker"))
@pytest.mark.parametrize("within", [False, True], ids=["alone", "within a batch"])
def test_nothing_in_a_file_is_run(tmp_path, way, within):
    marker = tmp_path / "marker"
    content, asked = hostile(marker)[way]
    if within:  # past PROTO and before STOP, as one more value of a good batch
        body = content[2:-1] if content[:1] == b"\x80" else content[:-1]
        content = batch(TWO, extra=body)
    message = refused(tmp_path / "batch", content)
    assert "refused: the file asks for " in message
    assert asked in message
    assert not marker.exists()


def test_the_hostile_files_are_hostile(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(hostile(marker)["system"][0])
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cnumpy\nndarray\nK\x00\x85R.",  # a type that is named is not called
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",  # no other encoding
        b"\x80\x02]]R.",  # a list is not a function
        b"\x80\x02}(]K\x01u.",  # a list is not a key
        b"\x80\x02}(K\x01u.",  # a key without value
        b"\x80\x02K\x01K\x01a.",  # a number is not a list
        b"\x80\x02]}b.",  # a list has no state
        b"\x80\x02h\x07.",  # nothing in the memo
        b"\x80\x02.",  # nothing on the stack
        b"\x80\x02u.",  # no mark
        b"\x80\x02].",  # not a dictionary
        b"\x80\x02}r\xff\xff\xff\xff.",  # a large index in the memo allocates nothing
        b"\x80\x02T\xff\xff\xff\x7f.",  # a long string that is not there
        b"\xff\xfe not a pickle",
    ],
)
def test_broken_files_are_rejected(tmp_path, content):
    refused(tmp_path / "batch", content)


@given(position=st.integers(0, 10_000), octet=st.integers(0, 255))
def test_a_damaged_file_gives_one_error_or_is_read(tmp_path_factory, position, octet):
    damaged = bytearray(batch(TWO))
    damaged[position % len(damaged)] = octet
    with contextlib.suppress(DataError):
        read(tmp_path_factory.getbasetemp() / "damaged", bytes(damaged))


def test_a_name_with_a_stray_backslash_is_one_error(tmp_path):
    refused(tmp_path / "damaged", batch(TWO).replace(b"numpy", b"num\\y", 1))


@both
def test_cifar10_is_loaded_by_name(tmp_path, python):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(1, 6):
        (folder / f"data_batch_{number}").write_bytes(batch(python, [number, 0]))
    (folder / "test_batch").write_bytes(batch(python, [9, 8]))
    data = catalogue.load("cifar10", tmp_path)
    assert data.y.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert data.y_test.tolist() == [9, 8]
    assert data.x.shape == (10, 3, 32, 32)
    assert data.x_test.tobytes() == PIXELS
    assert data.x.flags.writeable
    assert data.x_test.flags.writeable
    assert data.classes[3] == "cat"
    (folder / "batches.meta").write_bytes(BATCHES_META[:-9])
    with pytest.raises(DataError, match=r"batches\.meta cannot be read"):
        catalogue.load("cifar10", tmp_path)


@both
def test_cifar100_is_loaded_by_name_with_its_fine_labels_and_names(tmp_path, python):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    coarse = integers([1, 1])
    (folder / "train").write_bytes(batch(python, [99, 0], "fine_labels", coarse_labels=coarse))
    (folder / "test").write_bytes(batch(python, [42, 7], "fine_labels", coarse_labels=coarse))
    assert catalogue.load("cifar100", tmp_path).classes[42] == "leopard"
    names = b"](" + b"".join(text(python, f"name {number}") for number in range(100)) + b"e"
    (folder / "meta").write_bytes(dictionary(python, fine_label_names=names))
    data = catalogue.load("cifar100", tmp_path)
    assert (data.y.tolist(), data.y_test.tolist(), data.classes[42]) == ([99, 0], [42, 7], "name 42")
