//! The pickle machine: what Python writes is seen as it was, and nothing that comes from elsewhere makes it panic or
//! ask for much memory.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use forebay_format::dcp::metadata::{DcpMetadata, EntryKind};
use forebay_format::pickle::{Graph, Node, Object, Options, Value, parse};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn unhex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

/// The form that `make_pickles.py` describes.
fn text(graph: &Graph<'_>, value: Value) -> String {
    let list = |items: &mut dyn Iterator<Item = Value>| -> String {
        items.map(|item| text(graph, item)).collect::<Vec<_>>().join(",")
    };
    match graph.node(value) {
        Node::None => "N".into(),
        Node::Bool(flag) => if flag { "T" } else { "F" }.into(),
        Node::Int(number) => format!("i{number}"),
        Node::BigInt(bytes) => format!("I{bytes:?}"),
        Node::Float(number) => format!("f{:016x}", number.to_bits()),
        Node::Str(text) => format!("s{}", serde_json::to_string(text).unwrap()),
        Node::Surrogate(bytes) => format!("S{bytes:?}"),
        Node::Bytes(bytes) => format!("b{}", hex(bytes)),
        Node::List(mut items) => format!("[{}]", list(&mut items)),
        Node::Tuple(mut items) => format!("({})", list(&mut items)),
        Node::Set(items) => set(graph, items.collect()),
        Node::Dict(pairs) => {
            let pair = |(key, value)| format!("{}:{}", text(graph, key), text(graph, value));
            format!("{{{}}}", pairs.map(pair).collect::<Vec<_>>().join(","))
        }
        Node::Global { module, name } => format!("g{module}.{name}"),
        Node::New(object) => {
            let state = text(graph, object.state);
            format!("new {} {state}{}", head(graph, &object), tail(graph, &object))
        }
        Node::Call(call) => called(graph, &call),
        Node::Persistent(id) => format!("p{}", text(graph, id)),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn set(graph: &Graph<'_>, items: Vec<Value>) -> String {
    let mut items: Vec<String> = items.into_iter().map(|item| text(graph, item)).collect();
    items.sort();
    format!("<{}>", items.join(","))
}

fn head(graph: &Graph<'_>, object: &Object) -> String {
    let (module, name) = graph.global_name(object.callable).unwrap();
    format!("{module}.{name} {}", text(graph, object.args))
}

fn tail(graph: &Graph<'_>, object: &Object) -> String {
    let parts = [("items", object.items), ("pairs", object.pairs), ("kwargs", object.kwargs)];
    let parts = parts.into_iter().filter(|(_, part)| !graph.is_none(*part));
    parts.map(|(name, part)| format!(" {name} {}", text(graph, part))).collect()
}

/// Sets and bytes are calls in old protocols, and show as what they are.
fn called(graph: &Graph<'_>, call: &Object) -> String {
    let (module, name) = graph.global_name(call.callable).unwrap();
    let first = graph.as_sequence(call.args).unwrap().next();
    match (module, name, first) {
        ("_codecs", "encode", Some(letters)) => {
            let letters = graph.as_str(letters).unwrap().chars();
            format!("b{}", hex(&letters.map(|letter| letter as u8).collect::<Vec<_>>()))
        }
        ("__builtin__" | "builtins", "bytes", None) => "b".into(),
        ("__builtin__" | "builtins", "set" | "frozenset", Some(items)) => {
            set(graph, graph.as_sequence(items).unwrap().collect())
        }
        _ => format!("call {}{}", head(graph, call), tail(graph, call)),
    }
}

#[test]
fn values_of_every_protocol_are_seen_as_python_wrote_them() {
    let file = std::fs::read(data("pickles.json")).unwrap();
    let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let cases = file["cases"].as_array().unwrap();
    assert!(cases.len() > 150);
    for case in cases {
        let pickle = unhex(case["hex"].as_str().unwrap());
        let graph = match parse(&pickle, &Options::ITEM) {
            Ok(graph) => graph,
            Err(error) => panic!("{}: {error}", case["name"]),
        };
        assert_eq!(graph.end(), pickle.len());
        let wanted = &file["values"][case["value"].as_str().unwrap()];
        assert_eq!(&text(&graph, graph.root()), wanted, "{}", case["name"]);
    }
}

fn real_pickles() -> Vec<Vec<u8>> {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases/dcp");
    ["hybrid_w4", "nested_w1", "zstd_w1", "optimizer_w1"]
        .map(|name| std::fs::read(cases.join(name).join("ckpt/.metadata")).unwrap())
        .into()
}

/// Reads in both ways; whatever is made must be bounded and can be walked.
fn survives(bytes: &[u8]) {
    for options in [Options::METADATA, Options::ITEM] {
        match parse(bytes, &options) {
            Ok(graph) => {
                assert!(graph.memory_bytes() <= 64 * bytes.len() + 4096, "{bytes:?}");
                assert!(graph.end() <= bytes.len());
            }
            Err(error) => assert!(!error.what().is_empty()),
        }
    }
    if let Ok(metadata) = DcpMetadata::read(bytes) {
        for entry in metadata.entries() {
            if let EntryKind::Tensor { shape, chunks, .. } = entry.kind {
                for chunk in chunks {
                    assert!(chunk.region().check_within(shape).is_ok());
                    assert!(chunk.place.is_none_or(|place| place.file < metadata.files().len()));
                }
            }
        }
    }
}

/// Most opcodes, and what makes some of their arguments sound.
const OPCODES: &[u8] = b"().0}]12NK\x01h\x00q\x00\x94aesubRcm\nn\nt\x85\x86\x87\x88\x89\
    \x81\x8f\x90\x91\x92\x93\x8c\x01xoQdl";

/// Where, a byte, and what to do with it.
fn change() -> impl Strategy<Value = (prop::sample::Index, u8, u8)> {
    (any::<prop::sample::Index>(), any::<u8>(), 0..4_u8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        survives(&bytes);
    }

    /// Opcodes only, so that stack and memo are exercised more than the arguments.
    #[test]
    fn any_opcodes_are_survived(
        opcodes in proptest::collection::vec(proptest::sample::select(
            OPCODES.to_vec()
        ), 0..120),
    ) {
        survives(&opcodes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn damaged_metadata_is_survived(
        which in 0..4_usize,
        changes in proptest::collection::vec(change(), 1..5),
    ) {
        let mut bytes = real_pickles().swap_remove(which);
        for (at, byte, kind) in changes {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => bytes.insert(at, byte),
                _ => drop(bytes.remove(at)),
            }
        }
        survives(&bytes);
    }

    /// Two pieces of real metadata, one after the other.
    #[test]
    fn spliced_metadata_is_survived(a in 0..4_usize, b in 0..4_usize, cut: prop::sample::Index,
    from: prop::sample::Index) {
        let pickles = real_pickles();
        let (head, tail) = (&pickles[a], &pickles[b]);
        let bytes = [&head[..cut.index(head.len())], &tail[from.index(tail.len())..]].concat();
        survives(&bytes);
    }
}
