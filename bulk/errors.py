"""What can go wrong with a dataset. Every message can be shown as it is.

DatasetError
├── SpecError        the spec: names the field and its limit
├── InputError       the input: names the file, and the line or row of it
└── OutputError      the output folder: another dataset's, or in use
"""


class DatasetError(Exception):
    pass


class SpecError(DatasetError):
    pass


class InputError(DatasetError):
    pass


class OutputError(DatasetError):
    pass
