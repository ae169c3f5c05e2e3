//! Small pickles by hand: what each opcode may and may not do. Those that Python wrote are in the crate's `tests`.

use super::*;

fn refuse(input: &[u8]) -> forebay_error::Error {
    match parse(input, &Options::METADATA) {
        Ok(_) => panic!("{input:?} was read"),
        Err(error) => error,
    }
}

#[test]
fn an_instance_keeps_its_class_arguments_and_state() {
    let input = b"\x80\x04\x8c\x01m\x8c\x01C\x93)\x81}\x8c\x01kK\x05sb.";
    let graph = parse(input, &Options::METADATA).unwrap();
    let object = graph.as_object(graph.root()).unwrap();
    assert_eq!(graph.global_name(object.callable), Some(("m", "C")));
    assert_eq!(graph.as_sequence(object.args).unwrap().len(), 0);
    let number = graph.get(object.state, "k").unwrap();
    assert_eq!(graph.as_u64(number), Some(5));
    assert_eq!(graph.end(), input.len());
    assert_eq!(graph.forbidden(graph.root()), None);
}

#[test]
fn calls_are_refused_in_metadata_and_opaque_in_items() {
    for input in [&b"cposix\ngetcwd\n(tR."[..], b"(iposix\ngetcwd\n.", b"(cposix\ngetcwd\no."] {
        let error = refuse(input);
        assert_eq!(error.code(), Code::ForbiddenGlobal);
        assert!(error.what().contains("posix.getcwd"), "{error}");
        let graph = parse(input, &Options::ITEM).unwrap();
        let reason = graph.forbidden(graph.root()).unwrap();
        assert_eq!(reason, "it is made by calling posix.getcwd");
    }
    // What a call gives is called.
    assert_eq!(refuse(b"ctorch\nSize\n)R)R.").code(), Code::ForbiddenGlobal);
    assert_eq!(refuse(b"\x80\x02\x82\x01.").code(), Code::ForbiddenGlobal);
}

#[test]
fn names_cannot_write_to_the_terminal() {
    let error = refuse(b"c\x1b[31m\nx\n(tR.");
    assert!(error.what().contains("\\u{1b}[31m.x"), "{error}");
}

#[test]
fn damaged_pickles_name_the_byte() {
    for (input, what) in [
        (&b""[..], "1 bytes are wanted where 0 are left, at byte 0"),
        (b"\x80\x04R.", "it takes a value that was never put there, at byte 2"),
        (b"\x80\x04\x8d\0\0\0\0\0\0\0\x40.", "bytes are wanted where 1 are left, at byte 2"),
        (b"\x80\x09.", "protocol 9"),
        (b"K\x01Q.", "persistent id"),
        (b"h\0.", "nothing was kept as number 0"),
        (b"Nr\xff\xff\xff\x7f.", "kept as number 2147483647"),
        (b"(K\x01K\x02e.", "never put there"),
        (b"}K\x01(s.", "never put there"),
        (b"](K\x01u.", "a key has no value"),
        (b"K\x01(K\x02a.", "never put there"),
        (b"K\x01K\x02a.", "holds none of their kind"),
        (b"N)R.", "something that has no name"),
        (b"N)\x81.", "of what is no class"),
        (b"NNb.", "no object"),
        (b"ca\nb\nNR.", "not a tuple"),
        (b"\xf0.", "0xf0 is no opcode"),
        (b"\x95\xff\0\0\0\0\0\0\0N.", "255 bytes are wanted"),
        (b"I1x\n.", "misspelt"),
        (b"g7\n.", "nothing was kept"),
        (b"V\\ud800\n.", "misspelt"),
        (b"N", "1 bytes are wanted where 0 are left, at byte 1"),
    ] {
        let error = refuse(input);
        assert!(error.what().contains(what), "{input:?}: {error}");
    }
}

#[test]
fn limits_hold() {
    let options = |limits| Options { limits, ..Options::METADATA };
    let deep = [vec![b'('; 1001], vec![b'.']].concat();
    assert!(refuse(&deep).what().contains("more than 1000 containers are open"));
    let limits = Limits { input_bytes: 3, ..Limits::METADATA };
    assert!(parse(b"NNN.", &options(limits)).is_err());
    let limits = Limits { words: 30, ..Limits::METADATA };
    assert!(parse(b"]]]]]]]]]].", &options(limits)).is_ok());
    let error = parse(b"]]]]]]]]]]].", &options(limits)).err().unwrap();
    assert!(error.what().contains("more values than fit"), "{error}");
    assert!(parse(b"(KKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKKt.", &options(limits)).is_ok());
    assert!(parse(&[&b"("[..], &[b'N'; 31], b"t."].concat(), &options(limits)).is_err());
}

#[test]
fn nesting_without_marks_is_flat() {
    let tuples = [vec![b'N'], vec![0x85; 1_000_000], vec![b'.']].concat();
    let graph = parse(&tuples, &Options::METADATA).unwrap();
    let mut value = graph.root();
    let mut depth = 0;
    while let Some(inner) = graph.as_sequence(value).and_then(|mut items| items.next()) {
        value = inner;
        depth += 1;
    }
    assert_eq!(depth, 1_000_000);
}

#[test]
fn containers_grow_after_they_were_handed_out() {
    // l = []; l.append(1); t = (l,); l.append(l); l.append(2), seen through the tuple.
    let input = b"\x80\x04]\x94K\x01a\x85h\x00h\x00a(K\x02N e0."
        .map(|byte| if byte == b' ' { b'N' } else { byte });
    let graph = parse(&input, &Options::METADATA).unwrap();
    let list = graph.as_sequence(graph.root()).unwrap().next().unwrap();
    let items: Vec<_> = graph.as_sequence(list).unwrap().collect();
    assert_eq!(items.len(), 5);
    assert_eq!(items[1], list);
    assert_eq!(graph.as_i64(items[2]), Some(2));
}

#[test]
fn text_that_is_not_utf8_is_kept_as_bytes() {
    // A lone surrogate, as Python writes it.
    let graph = parse(b"\x8c\x03\xed\xb3\xbf.", &Options::METADATA).unwrap();
    assert!(matches!(graph.node(graph.root()), Node::Surrogate(b"\xed\xb3\xbf")));
    assert_eq!(graph.as_str(graph.root()), None);
}

#[test]
fn long_integers_are_bytes_and_shorter_ones_are_numbers() {
    let of = |pickle: &'static [u8]| {
        let graph = parse(pickle, &Options::METADATA).unwrap();
        (graph.as_i64(graph.root()), graph.as_u64(graph.root()))
    };
    assert_eq!(of(b"\x8a\x00."), (Some(0), Some(0)));
    assert_eq!(of(b"\x8a\x05\0\0\0\0\x01."), (Some(1 << 32), Some(1 << 32)));
    assert_eq!(of(b"\x8a\x01\xff."), (Some(-1), None));
    assert_eq!(of(b"\x8a\x08\0\0\0\0\0\0\0\x80."), (Some(i64::MIN), None));
    assert_eq!(of(b"\x8a\x09\0\0\0\0\0\0\0\x80\0."), (None, None));
}

/// Tuples that hold the one before twice, `depth` times, as a key by way of `end`.
fn doubled(start: &[u8], depth: usize, end: &[u8]) -> Vec<u8> {
    let twice = b"0h\0h\0\x86q\0".repeat(depth);
    [b"\x80\x02".as_slice(), start, b"K\x01\x85q\0", &twice, end].concat()
}

#[test]
fn keys_that_take_long_to_hash_are_refused() {
    let ways: [(&[u8], &[u8]); 5] = [
        (b"}", b"K\x01s."),
        (b"(", b"K\x01d."),
        (b"\x8f(", b"\x90."),
        (b"(", b"\x91."),
        (b"c__builtin__\nset\n](", b"e\x85R."),
    ];
    for (start, end) in ways {
        let error = match parse(&doubled(start, 60, end), &Options::ITEM) {
            Ok(_) => panic!("{start:?} was read"),
            Err(error) => error,
        };
        assert!(error.what().contains("are to be hashed"), "{error}");
        parse(&doubled(start, 8, end), &Options::ITEM).unwrap();
    }
    // As a value nobody hashes it.
    parse(&doubled(b"}K\x01", 60, b"s."), &Options::ITEM).unwrap();
}

#[test]
fn a_value_is_not_kept_under_a_number_far_away() {
    let error = match parse(b"\x80\x02Nr\0\0\0\x08.", &Options::ITEM) {
        Ok(_) => panic!("it was read"),
        Err(error) => error,
    };
    assert!(error.what().contains("kept as number"), "{error}");
}
