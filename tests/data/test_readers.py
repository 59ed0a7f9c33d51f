"""The user's own data: arrays, folders of images, torch datasets."""

import struct
import subprocess
import zlib

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from fedrane.data import from_folder, from_npz, from_torch, load, readers
from fedrane.data.dataset import hold_out
from fedrane.errors import DataError, TooLarge

RNG = np.random.default_rng(5)
COLOUR = RNG.integers(0, 256, (10, 3, 6, 5), dtype=np.uint8)  # no two axes are equal: a swap shows
GREY = COLOUR[:, 0]
LABELS = np.array([0, 1] * 5)


def npz(tmp_path, **arrays):
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    return path


def complete(x, **more):
    """With a test set, so that no example is held out."""
    return {"x": x, "y": LABELS, "x_test": x, "y_test": LABELS, **more}


def refused(reader, *arguments):
    with pytest.raises(DataError) as caught:
        reader(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (COLOUR, COLOUR),
        (COLOUR.transpose(0, 2, 3, 1), COLOUR),
        (GREY, GREY[:, None]),
        (GREY[:, None], GREY[:, None]),
        (GREY[..., None], GREY[:, None]),
        (COLOUR / 255, COLOUR),
        ((COLOUR / 255).astype(np.float32).transpose(0, 2, 3, 1), COLOUR),
        ((GREY / 255).astype(np.float16), None),
        (GREY > 99, np.where(GREY > 99, 255, 0)[:, None]),
        (COLOUR[:, :2], COLOUR[:, :2]),
        (COLOUR[..., :3], COLOUR[..., :3]),
    ],
    ids=["nchw", "nhwc", "nhw", "n1hw", "nhw1", "float", "float nhwc", "half", "bool", "two channels", "both ends 3"],
)
def test_images_in_any_layout(tmp_path, stored, expected):
    data = from_npz(npz(tmp_path, **complete(stored)))
    assert data.x.dtype == np.uint8
    assert data.x.flags.c_contiguous
    assert (data.x == (GREY[:, None] if expected is None else expected)).all()
    assert (data.x_test == data.x).all()
    scaled = data.x / 255
    assert data.mean == pytest.approx(scaled.mean(axis=(0, 2, 3)))
    assert data.std == pytest.approx(scaled.std(axis=(0, 2, 3)))
    assert (data.name, data.client) == ("mine", None)


def test_a_table_becomes_float32_and_a_constant_column_keeps_its_scale(tmp_path):
    table = np.stack([np.arange(10.0), np.full(10, 0.1), -np.arange(10.0)], axis=1)
    data = from_npz(npz(tmp_path, **complete(table)))
    assert (data.x.dtype, data.shape) == (np.float32, (3,))
    assert data.mean == pytest.approx((4.5, 0.1, -4.5))
    assert data.std == pytest.approx((np.arange(10).std(), 1.0, np.arange(10).std()))
    whole = from_npz(npz(tmp_path, **complete(np.arange(20, dtype=np.uint8).reshape(10, 2))))
    assert whole.x.tolist() == np.arange(20.0).reshape(10, 2).tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_table_with_an_unusable_number_is_rejected(tmp_path, value):
    table = np.zeros((10, 3))
    table[4, 2] = value
    message = refused(from_npz, npz(tmp_path, **complete(table)))
    assert "mine.npz: x has" in message
    assert "row 4, column 2" in message


@pytest.mark.parametrize("images", [COLOUR / 128, COLOUR / 255 - 0.5, COLOUR.astype(int), COLOUR.astype(float)])
def test_images_that_are_neither_bytes_nor_in_the_unit_range_are_rejected(tmp_path, images):
    message = refused(from_npz, npz(tmp_path, **complete(images)))
    assert f"images of {images.dtype} from {images.min()} to {images.max()}" in message
    assert all(remedy in message for remedy in ("as uint8", "divide by", "do not normalise"))


def test_images_with_nan_are_rejected(tmp_path):
    holes = np.where(COLOUR > 3, COLOUR / 255, np.nan)
    assert "not a number" in refused(from_npz, npz(tmp_path, **complete(holes)))


@pytest.mark.parametrize(
    "x", [np.zeros(10), np.zeros((10, 1, 2, 3, 4)), np.zeros((10, 2), complex), np.array(["a"] * 10)]
)
def test_inputs_of_another_type_are_rejected(tmp_path, x):
    assert "mine.npz: x is" in refused(from_npz, npz(tmp_path, **complete(x)))


def test_labels_are_numbered_in_sorted_order(tmp_path):
    names = np.array(["dog", "cat", "cat", "eel", "dog", "dog", "cat", "cat", "dog", "dog"])
    data = from_npz(npz(tmp_path, x=GREY, y=names, x_test=GREY[:2], y_test=np.array(["eel", "ant"])))
    assert data.classes == ("ant", "cat", "dog", "eel")
    assert data.y.tolist() == [2, 1, 1, 3, 2, 2, 1, 1, 2, 2]
    assert data.y_test.tolist() == [3, 0]
    octets = from_npz(npz(tmp_path, x=GREY, y=names.astype("S"), x_test=GREY[:1], y_test=np.array(["dog"])))
    assert octets.classes == ("cat", "dog", "eel")
    numbers = np.array([30, 4, 4, 4, 30, 30, 4, 4, 4, 4])
    data = from_npz(npz(tmp_path, x=GREY, y=numbers, x_test=GREY[:1], y_test=np.array([7], np.uint64)))
    assert (data.classes, data.y[:2].tolist(), data.y_test.tolist()) == (("4", "7", "30"), [2, 0], [1])


def test_given_classes_are_taken_in_their_order(tmp_path):
    numbers = from_npz(npz(tmp_path, **complete(GREY, classes=np.array(["zebra", "ape", "unseen"]))))
    assert (numbers.classes, numbers.y.tolist()) == (("zebra", "ape", "unseen"), LABELS.tolist())
    named = complete(GREY) | {"y": np.array(["zebra", "ape"] * 5), "y_test": np.array(["ape"] * 10)}
    names = from_npz(npz(tmp_path, **named, classes=np.array(["zebra", "ape"])))
    assert (names.y.tolist(), names.y_test.tolist()) == (LABELS.tolist(), [1] * 10)
    assert "label 1 is not one of" in refused(from_npz, npz(tmp_path, **complete(GREY, classes=np.array(["one"]))))
    assert "twice" in refused(from_npz, npz(tmp_path, **complete(GREY, classes=np.array(["one", "one"]))))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            {"y": LABELS.astype(float)},
            "of integers or of names. Numbers are predicted from a table, with task=regression",
        ),
        ({"y": LABELS[:, None]}, "y is int64"),
        ({"y": LABELS[:9]}, "10 inputs but 9 labels"),
        ({"y": np.array(["a", "b"] * 5)}, "numbers and names"),
        ({"client": LABELS[:9]}, "10 inputs but 9 client entries"),
        ({"client": LABELS / 2}, "client is float64"),
        ({"lables": LABELS}, "Known: x, y, client"),
        ({"y_test": LABELS[:9]}, "10 test inputs but 9 labels"),
        ({"x_test": COLOUR}, "of the same shape"),
        ({"x": GREY[:0]}, "x is uint8"),
        ({"y": np.array([None] * 10)}, "without arrays of objects"),
    ],
)
def test_inconsistent_arrays_are_rejected(tmp_path, wrong, complaint):
    path = npz(tmp_path, **(complete(GREY) | wrong))
    message = refused(from_npz, path)
    assert complaint in message
    assert "mine" in message


@pytest.mark.parametrize("left_out", ["x", "y", "x_test", "y_test"])
def test_inputs_and_labels_come_together(tmp_path, left_out):
    arrays = {name: array for name, array in complete(GREY).items() if name != left_out}
    assert f"no array {left_out!r}" in refused(from_npz, npz(tmp_path, **arrays))


def test_a_file_that_is_not_an_archive_of_arrays_is_rejected(tmp_path):
    path = tmp_path / "mine.npz"
    assert "does not exist" in refused(load, str(path))
    for content in (b"", b"no archive", npz(tmp_path, x=GREY, y=LABELS).read_bytes()[:-30]):
        path.write_bytes(content)
        assert "cannot be read" in refused(load, str(path))
    with path.open("wb") as stream:
        np.save(stream, GREY)
    assert "cannot be read" in refused(load, str(path))


def test_arrays_are_compared_with_the_memory_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros((3000, 100, 100), np.uint8), y=np.arange(3000) % 2)
    assert path.stat().st_size < 50_000
    monkeypatch.setenv("FEDRANE_MEMORY", "0.1")
    with pytest.raises(
        TooLarge, match=r"the dataset in .*bomb\.npz needs about 544 MiB of memory: 102 MiB are available"
    ):
        load(str(path))
    with pytest.raises(TooLarge, match="needs about"):
        readers.read_labelled(path, ("0", "1"))
    monkeypatch.setenv("FEDRANE_MEMORY", "0.05")
    with pytest.raises(TooLarge, match=r"x of .*bomb\.npz needs about 60\.2 MiB"):
        readers.read_inputs(path, lambda shape: None)
    monkeypatch.setenv("FEDRANE_MEMORY", "unlimited")
    assert len(readers.read_inputs(path, lambda shape: None)) == 3000


def test_inputs_are_read_alone_and_after_their_shape_was_seen(tmp_path):
    path = npz(tmp_path, x=COLOUR.transpose(0, 2, 3, 1), other=np.array([None]))

    def only_rows(shape):
        raise DataError(f"shape {shape}")

    assert refused(readers.read_inputs, path, only_rows) == "shape (3, 6, 5)."
    assert (readers.read_inputs(path, lambda shape: None) == COLOUR).all()


def test_without_a_test_set_a_fixed_fifth_of_each_class_is_held_out(tmp_path):
    x, y = np.arange(50.0).reshape(25, 2), np.array([0] * 15 + [1] * 8 + [2] * 2)
    data = load(str(npz(tmp_path, x=x, y=y)))
    assert np.bincount(data.y_test).tolist() == [3, 2, 1]
    held = hold_out(y)
    assert (data.x == x[~held]).all()
    assert (data.x_test == x[held]).all()
    assert data.mean == pytest.approx(x[~held].mean(axis=0))
    lonely = npz(tmp_path, x=x[:2], y=np.array([0, 1]))
    assert "no example can be held out" in refused(from_npz, lonely)


def test_clients_are_numbered_and_none_loses_its_only_example(tmp_path):
    y = np.zeros(40, int)
    lonely = np.flatnonzero(hold_out(y))[0]
    client = np.array(["ann"] * 20 + ["bob"] * 20)
    client[lonely] = "zoe"
    data = from_npz(npz(tmp_path, x=np.arange(40.0)[:, None], y=y, client=client))
    assert data.client is not None
    assert data.client.dtype == np.int64
    assert data.client.max() == 2
    assert data.x[data.client == 2].tolist() == [[lonely]]
    assert [("ann", "bob", "zoe")[number] for number in data.client] == client[data.x[:, 0].astype(int)].tolist()
    assert len(data.y_test) == 7


def picture(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path)


def test_a_folder_of_classes(tmp_path):
    for number in range(5):
        picture(tmp_path / "cat" / f"{number}.png", GREY[number])
        picture(tmp_path / "ant" / f"{number}.PNG", GREY[number + 5])
    (tmp_path / "cat" / "notes.txt").write_text("ignored where there are images")
    picture(tmp_path / ".hidden" / "0.png", GREY[0])
    picture(tmp_path / "ant" / ".0.png", GREY[0])
    data = load(str(tmp_path))
    assert (data.classes, data.shape, data.client) == (("ant", "cat"), (1, 6, 5), None)
    assert (len(data.y), len(data.y_test)) == (8, 2)
    held = hold_out(np.repeat([0, 1], 5))
    assert (data.x[:, 0] == GREY[[5, 6, 7, 8, 9, 0, 1, 2, 3, 4]][~held]).all()
    assert data.name == tmp_path.name


def test_a_folder_of_clients_with_train_and_test(tmp_path):
    for client in ("zoe", "ann"):
        for number, label in enumerate(("cat", "dog")):
            picture(tmp_path / "train" / client / label / "1.png", COLOUR[number].transpose(1, 2, 0))
    picture(tmp_path / "test" / "ann" / "dog" / "1.png", COLOUR[2].transpose(1, 2, 0))
    picture(tmp_path / "test" / "ann" / "eel" / "1.png", GREY[3])
    data = from_folder(tmp_path)
    assert data.classes == ("cat", "dog", "eel")
    assert (data.y.tolist(), data.y_test.tolist()) == ([0, 1, 0, 1], [1, 2])
    assert data.client is not None
    assert data.client.tolist() == [0, 0, 1, 1]
    assert (data.x[1] == COLOUR[1]).all()
    assert (data.x_test[1] == GREY[3]).all()  # a grey image among RGB images: the same in all channels


def test_a_folder_with_only_train_holds_out_examples(tmp_path):
    for number in range(4):
        picture(tmp_path / "train" / "cat" / f"{number}.png", GREY[number])
    assert (len(from_folder(tmp_path).y), from_folder(tmp_path).classes) == (3, ("cat",))


def test_train_beside_other_folders_is_a_class(tmp_path):
    for label in ("train", "bus"):
        for number in range(2):
            picture(tmp_path / label / f"{number}.png", GREY[number])
    assert from_folder(tmp_path).classes == ("bus", "train")


def test_images_of_every_mode_and_format(tmp_path):
    for number, mode in enumerate(("1", "L", "LA", "P", "RGB", "RGBA")):
        picture(tmp_path / "train" / "a" / f"{number}.png", COLOUR[0].transpose(1, 2, 0), mode)
        picture(tmp_path / "test" / "a" / f"{number}.bmp", COLOUR[0].transpose(1, 2, 0))
    data = from_folder(tmp_path)
    assert data.shape == (3, 6, 5)
    assert (data.x[4] == COLOUR[0]).all()
    assert (data.x[5] == COLOUR[0]).all()
    assert (data.x[1, 0] == data.x[1, 2]).all()


def test_images_of_unequal_sizes_need_a_size(tmp_path):
    picture(tmp_path / "cat" / "1.png", GREY[0])
    picture(tmp_path / "cat" / "2.png", GREY[0].T)
    message = refused(load, str(tmp_path))
    assert "6 × 5" in message
    assert "2.png is 5 × 6" in message
    assert "image_size" in message
    assert load(str(tmp_path), image_size=8).shape == (1, 8, 8)
    assert "image_size is -1" in refused(from_folder, tmp_path, -1)


def test_an_image_that_cannot_be_read_is_named(tmp_path):
    picture(tmp_path / "cat" / "1.png", GREY[0])
    broken = tmp_path / "cat" / "2.png"
    for content in (b"no image", (tmp_path / "cat" / "1.png").read_bytes()[:-40]):
        broken.write_bytes(content)
        assert f"{broken} cannot be read as an image" in refused(from_folder, tmp_path)
    picture(broken, GREY[0].astype(np.uint16))
    assert f"{broken} has more than 8 bits" in refused(from_folder, tmp_path)


def test_another_format_under_the_name_of_an_image_is_not_opened(tmp_path, monkeypatch):
    """Pillow gives PostScript to Ghostscript, which is a program that can do anything."""
    ran = []
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **_: ran.append(command))
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: ran.append("gs"))
    Image.init()  # all formats that Pillow knows
    broken = tmp_path / "cat" / "1.png"
    broken.parent.mkdir()
    dds = b"DDS " + struct.pack("<7I", 124, 0x1007, 4, 4, 0, 0, 0) + bytes(44) + struct.pack("<2I4s", 32, 4, b"DX99")
    avif = b"\x00\x00\x00\x1cftypavif" + bytes(40)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) show\n%%EOF\n"
    for content in (eps, dds + bytes(200), avif):
        broken.write_bytes(content)
        message = refused(from_folder, tmp_path)
        assert f"{broken} cannot be read as an image: images are PNG, JPEG" in message
        assert message == refused(readers.read_image, broken, (1, 8, 8))
    assert not ran


@pytest.mark.parametrize("side", [9_500, 20_000], ids=["where Pillow warns", "where Pillow stops"])
def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path, side, monkeypatch):
    """A few bytes can declare any size; only the header is needed to see it."""
    bomb = tmp_path / "cat" / "1.png"
    picture(bomb, GREY[0])
    png = bytearray(bomb.read_bytes())
    png[16:24] = struct.pack(">II", side, side)
    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    bomb.write_bytes(png)
    monkeypatch.setenv("FEDRANE_MEMORY", "unlimited")
    for reader, arguments in ((from_folder, (tmp_path, 8)), (readers.read_image, (bomb, (1, 8, 8), 8))):
        assert f"{bomb} has too many pixels: 89,478,485 are the most" in refused(reader, *arguments)


def test_images_are_compared_with_the_memory_before_they_are_decoded(tmp_path, monkeypatch):
    decoded = []
    monkeypatch.setattr(readers, "pixels_of", lambda *_: decoded.append(1))
    for number in range(6):
        picture(tmp_path / "cat" / f"{number}.png", np.zeros((2000, 2000), np.uint8))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.png")) < 100_000
    monkeypatch.setenv("FEDRANE_MEMORY", "0.2")
    with pytest.raises(TooLarge, match=r"6 images like .*0\.png needs about 435 MiB of memory: 205 MiB are available"):
        from_folder(tmp_path)
    with pytest.raises(TooLarge, match=r"needs about 42\.5 GiB.*Set a smaller image_size"):
        from_folder(tmp_path, 20_000)
    with pytest.raises(TooLarge, match=r"0\.png needs about 1\.49 GiB"):
        readers.read_image(tmp_path / "cat" / "0.png", (1, 8, 8), 20_000)
    assert not decoded


def test_colour_among_grey_images_is_compared_again(tmp_path, monkeypatch):
    for number in range(3):
        picture(tmp_path / "cat" / f"{number}.png", np.zeros((300, 300) + (3,) * (number == 2), np.uint8))
    shapes = []
    monkeypatch.setattr(readers.memory, "require", lambda needed, *_: shapes.append(needed))
    assert from_folder(tmp_path).shape == (3, 300, 300)
    assert len(shapes) == 2


def test_a_folder_with_a_wrong_layout_is_rejected(tmp_path):
    assert "is not a folder" in refused(from_folder, tmp_path / "none")
    assert "has no images" in refused(from_folder, tmp_path)
    (tmp_path / "notes.txt").write_text("nothing")
    assert f"has no images but {tmp_path / 'notes.txt'}" in refused(from_folder, tmp_path)
    picture(tmp_path / "1.png", GREY[0])
    assert "class/" in refused(from_folder, tmp_path)
    (tmp_path / "1.png").unlink()
    picture(tmp_path / "cat" / "1.png", GREY[0])
    picture(tmp_path / "ann" / "cat" / "2.png", GREY[0])
    message = refused(from_folder, tmp_path)
    assert str(tmp_path / "cat" / "1.png") in message
    assert str(tmp_path / "ann" / "cat" / "2.png") in message


class Items(TorchDataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.parametrize(
    "convert",
    [
        torch.from_numpy,
        lambda image: torch.from_numpy(image) / 255,
        lambda image: image,
        lambda image: image.transpose(1, 2, 0),
        lambda image: Image.fromarray(image.transpose(1, 2, 0)),
        lambda image: Image.fromarray(image.transpose(1, 2, 0)).convert("RGBA"),
    ],
    ids=["bytes", "fractions", "array", "array hwc", "picture", "transparent picture"],
)
@pytest.mark.parametrize("label", [int, torch.tensor, np.int32, lambda number: "ab"[number]])
def test_a_torch_dataset_of_images(convert, label):
    items = Items([(convert(image), label(number)) for image, number in zip(COLOUR, LABELS, strict=True)])
    data = from_torch(items, items, name="mine")
    assert (data.x == COLOUR).all()
    assert (data.x_test == COLOUR).all()
    assert data.y.tolist() == LABELS.tolist()
    assert data.name == "mine"
    assert len(from_torch(items).y) == 8


def test_a_torch_dataset_of_a_table():
    data = from_torch(TensorDataset(torch.arange(20.0).reshape(10, 2), torch.tensor(LABELS)))
    assert (data.x.dtype, data.shape, len(data.y_test)) == (np.float32, (2,), 2)


def test_grey_pictures_stay_grey():
    data = from_torch(Items([(Image.fromarray(GREY[number]), 0) for number in range(4)]))
    assert data.shape == (1, 6, 5)


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        (Items([(np.zeros((2, 2)), 0), (np.zeros((2, 3)), 0)]), "item 1 is (2, 3) and item 0 is (2, 2)"),
        (Items([(np.zeros(2), np.zeros(2))]), "item 0 cannot be used"),
        (Items([np.zeros(3)]), "item 0 cannot be used"),
        (Items([(np.zeros(2), 0.5)] * 9), "y is float64"),
        (Items([(torch.randn(1, 4, 4) * 9, 0)] * 9), "do not normalise"),
        (Items([]), "x is"),
        (iter([]), "has no length"),
    ],
    ids=["shapes", "two labels", "no label", "half a class", "normalised", "empty", "stream"],
)
def test_an_inconsistent_torch_dataset_is_rejected(items, complaint):
    message = refused(from_torch, items)
    assert complaint in message
    assert "torch" in message
