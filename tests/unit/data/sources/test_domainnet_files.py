"""DomainNet in its authors' archives, folders and lists."""

import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from fedjax_het import load_dataset
from fedjax_het.data.sources.domainnet import CLASSES, DOMAINS
from fedjax_het.utils.errors import ConfigError


def write_domain(root, domain, seed, *, as_zip, lists="."):
    """Write images in shades that name them, of the ten classes and of another one."""
    rng, content = np.random.default_rng(seed), {"train": [], "test": []}
    for split, count in (("train", 8), ("test", 5)):
        lines = []
        for number in range(count):
            label = int(rng.integers(11))
            name = [*CLASSES, "axe"][label]
            path, shade = f"{domain}/{name}/{domain}_{split}_{number}.png", int(rng.integers(256))
            file = io.BytesIO()
            Image.new("RGB", (20 + number, 30), (shade, 0, seed)).save(file, "PNG")
            content[split].append((path, file.getvalue(), label, shade))
            lines.append(f"{path} {label + 100}")
        (root / lists).mkdir(exist_ok=True, parents=True)
        (root / lists / f"{domain}_{split}.txt").write_text("\n".join(lines) + "\n")
    images = [image for images in content.values() for image in images]
    if as_zip:
        with zipfile.ZipFile(root / f"{domain}.zip", "w") as archive:
            for path, encoded, *_ in images:
                archive.writestr(path, encoded)
    else:
        for path, encoded, *_ in images:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(encoded)
    return content


@pytest.mark.parametrize("as_zip", [False, True])
def test_lists_give_the_order(as_zip, tmp_path):
    cache, root = tmp_path / "cache", tmp_path / "domainnet"
    lists = "txt" if as_zip else "."
    contents = [
        write_domain(root, domain, seed, as_zip=as_zip, lists=lists)
        for seed, domain in enumerate(DOMAINS)
    ]
    dataset = load_dataset("domainnet", data_dir=tmp_path, cache_dir=cache)
    assert dataset.class_names == CLASSES and dataset.domain_names == DOMAINS
    for split in ("train", "test"):
        kept = [(d, x) for d, c in enumerate(contents) for x in c[split] if x[2] < len(CLASSES)]
        images = getattr(dataset, f"{split}_inputs")
        assert images.shape[1:] == (64, 64, 3)
        np.testing.assert_array_equal(images[:, 5, 5, 0], [shade for _, (*_, shade) in kept])
        labels, domains = getattr(dataset, f"{split}_labels"), getattr(dataset, f"{split}_domains")
        np.testing.assert_array_equal(labels, [label for _, (_, _, label, _) in kept])
        np.testing.assert_array_equal(domains, [domain for domain, _ in kept])
    assert dataset.order == "files" and "64x64" in dataset.note
    again = load_dataset("domainnet", data_dir=root, cache_dir=cache)
    assert again.digest() == dataset.digest()


def test_missing_domain(tmp_path):
    for seed, domain in enumerate(DOMAINS[:-1]):
        write_domain(tmp_path, domain, seed, as_zip=True)
    with pytest.raises(ConfigError, match=r"^dataset = 'domainnet': no file .*sketch\.zip and no"):
        load_dataset("domainnet", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    content = write_domain(tmp_path, "sketch", 9, as_zip=True)
    (tmp_path / "sketch_test.txt").write_text("sketch/bird/none.png 1\n")
    with pytest.raises(ConfigError, match=r"sketch/bird/none\.png cannot be read"):
        load_dataset("domainnet", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert content["test"]
    (tmp_path / "sketch_test.txt").write_text("no list\n")
    with pytest.raises(ConfigError, match=r"sketch_test\.txt has no image of the ten classes"):
        load_dataset("domainnet", data_dir=tmp_path, cache_dir=tmp_path / "cache")
