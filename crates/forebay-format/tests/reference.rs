//! Headers and new files against the safetensors library itself: sound headers, headers with bytes changed, and
//! headers from a grammar of the library's odder habits.

use forebay_error::Code;
use forebay_format::safetensors::{TensorSpec, layout, parse_header};
use forebay_tensor::{Dtype, byte_len};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::collections::{BTreeMap, HashMap};

/// A file of this header and so many bytes of data.
fn file(json: &[u8], data_len: usize) -> Vec<u8> {
    let mut file = (json.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(json);
    file.resize(8 + json.len() + data_len, 7);
    file
}

/// Both verdicts; where both accept, both must have read the same.
fn compare(json: &[u8], data_len: usize) -> Result<Option<Code>, TestCaseError> {
    let file = file(json, data_len);
    let theirs = SafeTensors::read_metadata(&file);
    let ours = parse_header(json, data_len as u64);
    match (theirs, ours) {
        (Ok((_, theirs)), Ok(ours)) => {
            let tensors = theirs.tensors();
            prop_assert_eq!(tensors.len(), ours.tensors.len());
            for tensor in &ours.tensors {
                let info = tensors[&tensor.name];
                prop_assert_eq!(info.dtype.to_string(), tensor.dtype.name());
                let shape: Vec<u64> = info.shape.iter().map(|&side| side as u64).collect();
                prop_assert_eq!(&shape, &tensor.shape);
                let offsets = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
                prop_assert_eq!(offsets, (tensor.begin, tensor.end));
            }
            let metadata = ours.metadata.map(|pairs| {
                let count = pairs.len();
                let map: HashMap<String, String> = pairs.into_iter().collect();
                assert_eq!(map.len(), count, "a key twice");
                map
            });
            prop_assert_eq!(theirs.metadata(), &metadata);
            Ok(None)
        }
        (Err(_), Err(error)) => Ok(Some(error.code())),
        (theirs, ours) => {
            let text = String::from_utf8_lossy(json);
            Err(TestCaseError::fail(format!("{text}\nlibrary: {theirs:?}\nhere: {ours:?}")))
        }
    }
}

fn cases(cases: u32) -> ProptestConfig {
    // PROPTEST_CASES asks for more.
    let default = ProptestConfig::default();
    ProptestConfig { cases: default.cases.max(cases), failure_persistence: None, ..default }
}

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

fn specs() -> impl Strategy<Value = Vec<TensorSpec>> {
    let names = "[a-c.\"\\\\é中\u{1}]{0,6}";
    let shape = prop::collection::vec(0_u64..5, 0..4);
    prop::collection::btree_map(names, (dtype(), shape), 0..6).prop_map(|tensors| {
        let spec = |(name, (dtype, shape))| TensorSpec { name, dtype, shape };
        let whole = |spec: &TensorSpec| byte_len(spec.dtype, &spec.shape).is_ok();
        tensors.into_iter().map(spec).filter(whole).collect()
    })
}

/// One pair at most: the library writes several in the order of a hash map.
fn metadata() -> impl Strategy<Value = Option<Vec<(String, String)>>> {
    prop::option::of(prop::collection::vec(("[a-b\"é]{0,3}", "[a-b\n]{0,3}"), 0..2))
}

/// A value of the grammar, nearly always of the right kind for its field.
fn odd_value() -> impl Strategy<Value = String> {
    let choices = [
        "0",
        "1",
        "2",
        "4",
        "8",
        "-0",
        "-1",
        "4.0",
        "1e1",
        "1e999",
        "18446744073709551615",
        "18446744073709551616",
        "null",
        "true",
        "\"F32\"",
        "\"U8\"",
        "\"F4\"",
        "\"f32\"",
        "{\"F32\":null}",
        "{\"U8\":{}}",
        "{\"U8\":[]}",
        "{\"U8\":null,\"U8\":null}",
        "{}",
        "{\"U8\":1}",
        "{\"X\":null}",
        "{\"U8\":{\"a\":1}}",
        "[]",
        "[1]",
        "[4]",
        "[2,2]",
        "[0,4]",
        "[0,8]",
        "[4,8]",
        "[0,0]",
        "[4,4]",
        "[4,0]",
        "[0,4,8]",
        "[[4]]",
        "[0,4,]",
        "\"\\ud800\"",
        "\"\\ud83d\\ude00\"",
        "\"a\\u0000\"",
        "\"\t\"",
        "01",
        "+1",
        ".5",
        "1.",
        "NaN",
        "[18446744073709551615]",
        "[0,18446744073709551615]",
        "[4294967296,4294967296]",
        "[4294967296,4294967296,0]",
        "[0,4294967296,4294967296]",
        "{\"dtype\":\"U8\"}",
        "",
        " [ 0 , 4 ] ",
        "[\"4\"]",
        "[null]",
        "[-1]",
    ];
    let choices: Vec<String> = choices.iter().map(|&text| text.to_owned()).collect();
    prop_oneof![
        8 => prop::sample::select(choices),
        1 => (100_usize..140).prop_map(|deep| "[".repeat(deep) + &"]".repeat(deep)),
        1 => (100_usize..140).prop_map(|deep| "{\"a\":".repeat(deep) + "1" + &"}".repeat(deep)),
    ]
}

fn odd_entry() -> impl Strategy<Value = String> {
    let field = |usual: &[&str]| {
        let usual: Vec<String> = usual.iter().map(|&text| text.to_owned()).collect();
        prop_oneof![8 => prop::sample::select(usual), 1 => odd_value()]
    };
    let dtype = field(&["\"U8\"", "\"U8\"", "\"U8\"", "\"F32\"", "\"F4\"", "{\"U8\":null}"]);
    let shape = field(&["[4]", "[4]", "[2,2]", "[]", "[1]", "[4294967296,4294967296]"]);
    let range = field(&["[0,4]", "[0,4]", "[0,4]", "[4,8]", "[2,6]", "[4,0]", "[0,1]"]);
    let extra = prop_oneof![
        12 => Just(String::new()),
        2 => odd_value().prop_map(|value| format!(",\"extra\":{value}")),
        1 => odd_value().prop_map(|value| format!(",\"dtype\":{value}")),
        1 => odd_value().prop_map(|value| format!(",{value}")),
    ];
    (dtype, shape, range, extra, 0..8).prop_map(|(dtype, shape, range, extra, form)| match form {
        0 => format!("[{dtype},{shape},{range}]"),
        1 => format!(
            "[{dtype},{shape},{range}{}]",
            extra.replace("\"extra\":", "").replace("\"dtype\":", "")
        ),
        2 => format!("{{\"shape\":{shape},\"dtype\":{dtype}{extra}}}"),
        3 => format!("{{\"data_offsets\":{range}{extra},\"shape\":{shape},\"dtype\":{dtype}}}"),
        _ => format!("{{\"dtype\":{dtype},\"shape\":{shape},\"data_offsets\":{range}{extra}}}"),
    })
}

fn odd_header() -> impl Strategy<Value = String> {
    let metadata = prop_oneof![
        4 => Just("{\"a\":\"b\"}".to_owned()),
        2 => Just("{\"a\":\"b\",\"a\":\"c\",\"d\":\"\"}".to_owned()),
        1 => Just("{\"a\":1}".to_owned()),
        1 => Just("[\"a\",\"b\"]".to_owned()),
        2 => odd_value(),
    ];
    let pair = prop_oneof![
        8 => ("[ab]", odd_entry()).prop_map(|(name, entry)| format!("\"{name}\":{entry}")),
        2 => metadata.prop_map(|value| format!("\"__metadata__\":{value}")),
        1 => odd_value().prop_map(|value| format!("\"a\":{value}")),
        1 => Just("\"__metad\\u0061ta__\":{}".to_owned()),
    ];
    let frame = prop_oneof![
        24 => Just(("{", "}")),
        1 => Just((" \n{", "} \t")),
        1 => Just(("[{", "}]")),
        1 => Just(("{", "}}")),
        1 => Just(("{", ",}")),
        1 => Just(("{", "")),
        1 => Just(("\u{feff}{", "}")),
        1 => Just(("{", "}\0")),
    ];
    (prop::collection::vec(pair, 0..4), frame)
        .prop_map(|(pairs, (open, close))| format!("{open}{}{close}", pairs.join(",")))
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn new_files_are_the_bytes_that_the_library_writes(tensors in specs(), metadata in metadata()) {
        // There the library writes `{},"__metadata__":{}}`, which it cannot read itself.
        if tensors.is_empty() && metadata.as_ref().is_some_and(Vec::is_empty) {
            return Ok(());
        }
        let plan = layout(&tensors, metadata.as_deref()).unwrap();
        let filled = |(fill, &len): (u8, &u64)| vec![fill; len as usize];
        let data: Vec<Vec<u8>> = (0..).zip(&plan.bytes).map(filled).collect();
        let mut ours = vec![0; plan.total as usize];
        ours[..plan.header.len()].copy_from_slice(&plan.header);
        for (data, &offset) in data.iter().zip(&plan.offsets) {
            ours[offset as usize..offset as usize + data.len()].copy_from_slice(data);
        }
        let views = tensors.iter().zip(&data).map(|(spec, data)| {
            let dtype = serde_json::from_str(&format!("\"{}\"", spec.dtype)).unwrap();
            let shape = spec.shape.iter().map(|&side| side as usize).collect();
            (spec.name.as_str(), TensorView::new(dtype, shape, data).unwrap())
        });
        let map = metadata.map(|pairs| pairs.into_iter().collect());
        let theirs = safetensors::serialize(views.collect::<Vec<_>>(), map).unwrap();
        prop_assert_eq!(ours, theirs);
    }

    #[test]
    fn changed_headers_have_the_same_verdict(
        tensors in specs(),
        metadata in metadata(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0..5, any::<u8>()), 0..4),
        longer in -2_i64..3,
    ) {
        let plan = layout(&tensors, metadata.as_deref()).unwrap();
        let mut json = plan.header[8..].to_vec();
        for (at, kind, byte) in edits {
            let at = at.index(json.len());
            let digit = b"0123456789,:[]{}\" -.eE\\u"[byte as usize % 24];
            match kind {
                0 => json[at] = byte,
                1 => json[at] = digit,
                2 => json.insert(at, digit),
                3 => drop(json.remove(at)),
                _ => json.truncate(at.max(1)),
            }
            if json.is_empty() {
                json.push(b' ');
            }
        }
        let data_len = plan.total as i64 - plan.header.len() as i64 + longer / 2;
        compare(&json, data_len.max(0) as usize)?;
    }

    #[test]
    fn noise_has_the_same_verdict(json in prop::collection::vec(any::<u8>(), 0..64)) {
        compare(&json, 0)?;
    }
}

proptest! {
    #![proptest_config(cases(4000))]

    #[test]
    fn odd_headers_have_the_same_verdict(
        json in odd_header(),
        data_len in prop::sample::select(vec![0, 4, 8, 16]),
    ) {
        compare(json.as_bytes(), data_len)?;
    }
}

/// Counts verdicts, so that the comparison above is known to meet both.
#[test]
fn the_grammar_meets_many_verdicts() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..4000 {
        let json = odd_header().new_tree(&mut runner).unwrap().current();
        for data_len in [0, 4] {
            let code = compare(json.as_bytes(), data_len).unwrap();
            *seen.entry(code.map_or("ok", Code::as_str)).or_default() += 1;
        }
    }
    for code in [
        "ok",
        "bad_field",
        "bad_metadata",
        "duplicate_key",
        "invalid_json",
        "not_an_object",
        "offset_hole",
        "offset_overlap",
        "offsets_reversed",
        "overflow",
        "shape_size_mismatch",
        "trailing_bytes",
        "truncated",
        "unknown_dtype",
        "misaligned",
    ] {
        assert!(seen.get(code).is_some_and(|&count| count > 9), "{code}: {seen:?}");
    }
}

#[test]
fn a_sum_that_wraps_is_out_of_bounds() {
    // U8 of 2^61 - 1 elements is the largest tensor; nine of them pass 2^64. The library adds the header and wraps.
    let len = (1_u64 << 61) - 1;
    let entry = |at: u64| {
        format!(
            "\"{at}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{},{}]}}",
            at * len,
            (at + 1) * len
        )
    };
    let eight: Vec<String> = (0..8).map(entry).collect();
    let json = format!("{{{}}}", eight.join(","));
    let error = parse_header(json.as_bytes(), 4).unwrap_err();
    assert_eq!(error.code(), Code::OutOfBounds, "{error}");
}
#[test]
fn habits_that_are_easily_missed() {
    let good = r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let odd = [
        (r#"{"dtype":{"U8":null},"shape":[4],"data_offsets":[0,4]}"#, true),
        (r#"{"dtype":{"U8":{}},"shape":[4],"data_offsets":[0,4]}"#, false),
        (r#"{"dtype":{"U8":[]},"shape":[4],"data_offsets":[0,4]}"#, false),
        (r#"{"dtype":{"U8":null,"F32":null},"shape":[4],"data_offsets":[0,4]}"#, false),
        (r#"{"dtype":{},"shape":[4],"data_offsets":[0,4]}"#, false),
        (r#"["U8",[4],[0,4]]"#, true),
        (r#"["U8",[4],[0,4],0]"#, false),
        (r#"["U8",[4]]"#, false),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1e999}"#, false),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":"\ud800"}"#, false),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1,"x":2}"#, true),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}"#, false),
        (r#"{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{}"#, false),
        (r#"{"dtype":"U8","shape":[9],"data_offsets":[0,9]},"a":["U8",[4],[0,4]]"#, true),
        (r#"GOOD,"__metad\u0061ta__":{"k":"1","k":"2"}"#, true),
        (r#"GOOD,"__metadata__":null,"__metadata__":{}"#, false),
    ];
    for (entry, accepted) in odd {
        let json = format!("{{\"a\":{}}}", entry.replace("GOOD", good));
        assert_eq!(compare(json.as_bytes(), 4).unwrap().is_none(), accepted, "{json}");
    }
}
