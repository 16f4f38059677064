"""Prepared data, written as tensorflow-datasets writes it, without TensorFlow."""

import io

import numpy as np
from PIL import Image


def random_images_and_labels(shape, num_classes, count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, num_classes, count)


def encode_image(image, jpeg):
    """As a file: the library itself encodes arrays with TensorFlow only."""
    file = io.BytesIO()
    picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
    picture.save(file, "JPEG" if jpeg else "PNG")
    file.seek(0)
    return file


def write_tfds_dataset(
    root,
    name,
    shape,
    num_classes,
    *,
    config="",
    version="1.0.0",
    jpeg=False,
    seed=0,
    extra=None,
    content=None,
    class_names=None,
):
    """Prepare images under `root` (default: random); returns {split: (images, labels)} as written.

    The library shuffles by hashed keys, so readers are compared as sets of pairs.
    """
    import tensorflow_datasets as tfds

    content = content or {
        split: random_images_and_labels(shape, num_classes, count, seed + index)
        for index, (split, count) in enumerate((("train", 23), ("test", 11)))
    }

    class Synthetic(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config, version=version)] if config else []

        def _info(self):
            image = tfds.features.Image(shape=shape, encoding_format="jpeg" if jpeg else None)
            names = {"names": class_names} if class_names else {"num_classes": num_classes}
            features = {"image": image, "label": tfds.features.ClassLabel(**names), **(extra or {})}
            dictionary = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=dictionary)

        def _split_generators(self, _):
            return {split: self._generate_examples(split) for split in content}

        def _generate_examples(self, split):
            for index, (image, label) in enumerate(zip(*content[split], strict=True)):
                name = f"{split}_{index:05d}"
                example = {key: name if key == "id" else 0 for key in (extra or {})}
                yield index, {"image": encode_image(image, jpeg), "label": int(label), **example}

    Synthetic.name = name
    options = {"config": config} if config else {}
    Synthetic(data_dir=root, file_format="array_record", **options).download_and_prepare()
    return content
