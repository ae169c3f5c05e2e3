"""Writes pickles.json: values, pickled by Python in each protocol that has them, and what a reader must see in each.

    python3 make_pickles.py > pickles.json

Both sides write a value as text: N, T, F, i5, f<bits>, s<JSON>, b<hex>, [list], (tuple), {key:value}, <set>,
new MODULE.NAME args state, call MODULE.NAME args.
"""

import collections
import enum
import json
import pickle
import pickletools
import struct
import sys


class Plain:
    def __init__(self, state):
        self.__dict__.update(state)


class WithSlots(Plain):
    __slots__ = ("slot",)


class Keyword(Plain):
    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self):
        pass

    def __getnewargs_ex__(self):
        return (1,), {"key": 2}


class MyList(list):
    pass


class MyDict(dict):
    pass


class Colour(enum.Enum):
    RED = 3


for made_up in (Plain, WithSlots, Keyword, MyList, MyDict, Colour):
    made_up.__module__ = "made.up"
module = type(sys)("made.up")
for made_up in (Plain, WithSlots, Keyword, MyList, MyDict, Colour):
    setattr(module, made_up.__name__, made_up)
sys.modules["made"] = type(sys)("made")
sys.modules["made.up"] = module


def text(value):
    kind = type(value)
    if value is None:
        return "N"
    if kind is bool:
        return "T" if value else "F"
    if kind is int:
        return f"i{value}"
    if kind is float:
        return "f" + struct.pack(">d", value).hex()
    if kind is str:
        return "s" + json.dumps(value, ensure_ascii=False)
    if kind in (bytes, bytearray):
        return "b" + bytes(value).hex()
    if kind is list:
        return "[" + ",".join(map(text, value)) + "]"
    if kind is tuple:
        return "(" + ",".join(map(text, value)) + ")"
    if kind is dict:
        return "{" + ",".join(f"{text(k)}:{text(v)}" for k, v in value.items()) + "}"
    if kind in (set, frozenset):
        return "<" + ",".join(sorted(map(text, value))) + ">"
    if kind is collections.OrderedDict:
        return "call collections.OrderedDict () pairs " + text(dict(value))
    if kind is Plain:
        return "new made.up.Plain () " + text(vars(value))
    if kind is Keyword:
        return "new made.up.Keyword (i1) N kwargs {s\"key\":i2}"
    if kind is MyList:
        return "new made.up.MyList () N items " + text(list(value))
    if kind is MyDict:
        return "new made.up.MyDict () N pairs " + text(dict(value))
    if kind is Colour:
        return "call made.up.Colour (i3)"
    raise TypeError(kind)


shared = ["shared"]
VALUES = {
    "constants": [None, True, False],
    "integers": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31 - 1, 2**31, 2**62, -(2**63), 2**63 - 1],
    "small_limits": [2**27 - 1, 2**27, -(2**27), -(2**27) - 1],
    "floats": [0.0, -0.0, 1.5, 1e300, 5e-324],
    "texts": ["", "plain", "é\n\\u0041\"'", "x" * 255, "x" * 256, "日本語", "😀"],
    "bytes": [b"", b"\0\xff", b"y" * 255, b"y" * 256],
    "empty": [[], (), {}, ""],
    "tuples": [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "long_list": list(range(1100)),
    "long_dict": {str(number): number for number in range(1100)},
    "dict_of_keys": {2: "a", "b": 2, (3, 4): None, True: False},
    "sets": [set(), {1, 2, 3}, frozenset(), frozenset("ab")],
    "shared": [shared, shared, (shared,), {"k": shared}],
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
}
deep = "bottom"
for level in range(90):
    deep = [deep] if level % 2 else (deep, {"k": level})
VALUES["deep"] = deep
OBJECTS = {
    "instance": [Plain({"a": 1, "b": "two"})],
    "keyword_arguments": [Keyword()],
    "list_subclass": [MyList([1, 2])],
    "dict_subclass": [MyDict({"k": 1})],
    "enumeration": [Colour.RED, Colour.RED],
}


def main():
    cases, texts = [], {}
    for values, first in ((VALUES, 0), (OBJECTS, 2)):
        for name, value in values.items():
            texts[name] = text(value)
            for protocol in range(first, 6):
                if name == "keyword_arguments" and protocol < 4:
                    continue
                plain = pickle.dumps(value, protocol)
                forms = {"": plain}
                if len(plain) < 3000:
                    forms["_optimized"] = pickletools.optimize(plain)
                for form, data in forms.items():
                    case = f"{name}_{protocol}{form}"
                    cases.append({"name": case, "value": name, "hex": data.hex()})
    json.dump({"values": texts, "cases": cases}, sys.stdout, indent=0, ensure_ascii=False)
    print()


main()
