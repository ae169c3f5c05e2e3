//! Logs that are changed, cut, torn and appended to by many: what the chain of hashes must show.

use super::*;

fn event(step: u64) -> Event {
    let text = |text: &str| Some(text.to_owned());
    Event {
        who: "ann@node1".to_owned(),
        what: "move".to_owned(),
        origin: "unix socket".to_owned(),
        step: Some(step),
        from: text("/near"),
        to: text("s3://far\nline"),
        checksum: text("00ff"),
        ..Event::default()
    }
}

fn written(count: u64) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.log");
    let log = AuditLog::open(&path).unwrap();
    for step in 0..count {
        assert_eq!(log.append(event(step)).unwrap().number, step);
    }
    (folder, path)
}

fn check(path: &Path) -> Result<Verified> {
    verify(path, None, |_| Ok(()))
}

#[test]
fn records_come_back_in_order() {
    let (_folder, path) = written(5);
    let mut steps = Vec::new();
    let found = verify(&path, None, |record| {
        assert_eq!(record.event, event(record.number));
        assert!(record.unix_ms > 1_700_000_000_000);
        steps.push(record.event.step.unwrap());
        Ok(())
    });
    let found = found.unwrap();
    assert_eq!((found.records, found.torn_bytes, steps), (5, 0, vec![0, 1, 2, 3, 4]));
    assert_eq!(found.bytes, std::fs::metadata(&path).unwrap().len());
}

#[test]
fn any_flipped_bit_names_the_record_it_is_in() {
    let (_folder, path) = written(4);
    let whole = std::fs::read(&path).unwrap();
    let line_of = |at: usize| whole[..at].iter().filter(|byte| **byte == b'\n').count();
    let last = line_of(whole.len() - 1);
    for at in 0..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 7);
        std::fs::write(&path, &bytes).unwrap();
        match check(&path) {
            Err(error) => {
                let named = format!("record {}", line_of(at));
                assert!(error.what().contains(&named), "byte {at}: {error}");
            }
            // The line's end is gone, so it counts as not written to its end.
            Ok(found) => {
                assert_eq!((line_of(at), whole[at]), (last, b'\n'), "byte {at}");
                assert_eq!((found.records, found.torn_bytes > 0), (3, true));
            }
        }
    }
}

#[test]
fn removed_swapped_and_forged_records_break_the_chain() {
    let (_folder, path) = written(4);
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let cases = [
        (vec![0, 2, 3], "record 1"),
        (vec![1, 2, 3], "record 0"),
        (vec![0, 2, 1, 3], "record 1"),
        (vec![0, 1, 1, 2], "record 2"),
    ];
    for (order, named) in cases {
        let text: String = order.iter().map(|at| lines[*at]).collect();
        std::fs::write(&path, text).unwrap();
        let error = check(&path).unwrap_err();
        assert_eq!(error.code(), Code::Checksum);
        assert!(error.what().contains(named), "{order:?}: {error}");
        let before = std::fs::read(&path).unwrap();
        assert!(AuditLog::open(&path).unwrap().append(event(9)).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
}

#[test]
fn a_torn_end_is_told_and_cut_off_by_the_next_append() {
    let (_folder, path) = written(3);
    let whole = std::fs::read(&path).unwrap();
    let second = whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(1).unwrap().0 + 1;
    for cut in second..whole.len() {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let found = check(&path).unwrap();
        assert_eq!((found.records, found.torn_bytes), (2, (cut - second) as u64));
        let record = AuditLog::open(&path).unwrap().append(event(7)).unwrap();
        let torn = u64::from(cut > second);
        assert_eq!(record.number, 2 + torn);
        let mut whats = Vec::new();
        let found = verify(&path, None, |record| {
            whats.push(record.event.what.clone());
            Ok(())
        });
        assert_eq!((found.unwrap().torn_bytes, whats.len() as u64), (0, 3 + torn));
        assert_eq!(whats.iter().any(|what| what == "torn"), cut > second);
    }
}

#[test]
fn an_end_that_was_cut_off_shows_against_what_was_noted() {
    let (_folder, path) = written(3);
    let noted = check(&path).unwrap();
    let expected = Some((noted.records, noted.head));
    assert!(verify(&path, expected, |_| Ok(())).is_ok());
    let text = std::fs::read_to_string(&path).unwrap();
    let cut: String = text.split_inclusive('\n').take(2).collect();
    std::fs::write(&path, cut).unwrap();
    assert_eq!(verify(&path, expected, |_| Ok(())).unwrap_err().code(), Code::Truncated);
    // Written anew it is another log.
    AuditLog::open(&path).unwrap().append(event(2)).unwrap();
    assert_eq!(verify(&path, expected, |_| Ok(())).unwrap_err().code(), Code::Checksum);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(check(&path).unwrap_err().code(), Code::NotFound);
}

#[test]
fn processes_that_append_at_once_make_one_chain() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.log");
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let path = &path;
            scope.spawn(move || {
                for step in 0..10 {
                    AuditLog::open(path).unwrap().append(event(writer * 100 + step)).unwrap();
                }
            });
        }
    });
    assert_eq!(check(&path).unwrap().records, 40);
    let mut huge = event(1);
    huge.note = Some("x".repeat(LINE_BYTES_MAX));
    assert_eq!(AuditLog::open(&path).unwrap().append(huge).unwrap_err().code(), Code::Unsupported);
    std::fs::write(&path, vec![b'x'; 3 * LINE_BYTES_MAX]).unwrap();
    assert_eq!(check(&path).unwrap_err().code(), Code::InvalidMetadata);
}

#[test]
fn a_chain_is_read_once_and_what_others_append_since() {
    let (_folder, path) = written(0);
    let (one, other) = (AuditLog::open(&path).unwrap(), AuditLog::open(&path).unwrap());
    for step in 0..6 {
        let log = if step % 3 == 2 { &other } else { &one };
        assert_eq!(log.append(event(step)).unwrap().number, step);
    }
    assert_eq!(check(&path).unwrap().records, 6);
    // What was changed behind its back is not read again by who has read it, and is found by a check all the same.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[70] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(one.append(event(6)).unwrap().number, 6);
    assert_eq!(AuditLog::open(&path).unwrap().append(event(7)).unwrap_err().code(), Code::Checksum);
    assert!(check(&path).unwrap_err().what().contains("record 0"));
    // What others append must follow.
    bytes[70] ^= 1;
    bytes.extend_from_slice(b"no record\n");
    std::fs::write(&path, &bytes).unwrap();
    assert!(other.append(event(8)).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

#[test]
fn an_end_that_is_cut_off_while_it_is_written_is_told() {
    let (_folder, path) = written(0);
    let log = AuditLog::open(&path).unwrap();
    let third = (0..3).map(|step| log.append(event(step)).unwrap()).last().unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let left: String = text.split_inclusive('\n').take(1).collect();
    std::fs::write(&path, left).unwrap();
    assert_eq!(log.append(event(7)).unwrap().number, 2);
    let mut notes = Vec::new();
    let found = verify(&path, None, |record| {
        notes.push((record.event.what.clone(), record.event.note.clone().unwrap_or_default()));
        Ok(())
    });
    assert_eq!(found.unwrap().records, 3);
    assert_eq!(notes[1].0, "cut");
    assert!(notes[1].1.contains(&format!("3:{}", hex(&third.hash))), "{notes:?}");
}
