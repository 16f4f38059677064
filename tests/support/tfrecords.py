"""TFRecord files, written without TensorFlow."""

import json
import struct


def crc32c(content):
    """Bit by bit, from the definition."""
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def mask(crc):
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(record):
    length = struct.pack("<Q", len(record))
    checksums = [struct.pack("<I", mask(crc32c(part))) for part in (length, record)]
    return length + checksums[0] + record + checksums[1]


def write_tfrecords(folder):
    """Replace the array_record files of a prepared data set by TFRecord files."""
    from array_record.python.array_record_module import ArrayRecordReader

    for path in folder.glob("*array_record*"):
        reader = ArrayRecordReader(str(path))
        records = reader.read(0, reader.num_records())
        target = folder / path.name.replace("array_record", "tfrecord")
        target.write_bytes(b"".join(map(frame, records)))
        path.unlink()
    info = folder / "dataset_info.json"
    text = info.read_text().replace("array_record", "tfrecord").replace("ARRAY_RECORD", "TFRECORD")
    info.write_text(json.dumps({**json.loads(text), "fileFormat": "tfrecord"}))
