//! Files and folders that are not what they should be, by accident or on purpose.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests are tests")]

use forebay_error::{Code, Error};
use forebay_format::safetensors::{parse_header, read_header};
use forebay_format::{Model, OpenFile, open_files, open_model};
use rustix::fs::{CWD, FileType, Mode};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

fn file(json: &str, data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data].concat()
}

fn entry(name: &str, begin: usize, end: usize) -> String {
    let len = end - begin;
    format!("\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{len}],\"data_offsets\":[{begin},{end}]}}")
}

/// A model of one tensor of four bytes.
fn small(name: &str) -> Vec<u8> {
    file(&format!("{{{}}}", entry(name, 0, 4)), b"data")
}

fn folder_with(names: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        fs::write(folder.path().join(name), small(name)).unwrap();
    }
    folder
}

fn index(folder: &Path, pairs: &[(&str, &str)]) {
    let map: serde_json::Map<_, _> =
        pairs.iter().map(|&(name, file)| (name.to_owned(), file.into())).collect();
    let text = serde_json::json!({ "weight_map": map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), text).unwrap();
}

fn fault(opened: Result<Model, Error>) -> (Code, String) {
    let error = opened.expect_err("must not open");
    (error.code(), error.render())
}

fn within(limit: Duration, work: impl FnOnce()) {
    let start = Instant::now();
    work();
    assert!(start.elapsed() < limit, "took {:?}", start.elapsed());
}

#[test]
fn only_regular_files_are_opened() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.safetensors");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let inner = folder.path().join("folder.safetensors");
    fs::create_dir(&inner).unwrap();
    within(Duration::from_secs(5), || {
        // Nobody writes to the pipe: opening it the usual way would wait for ever.
        let (code, text) = fault(open_model(&pipe));
        assert_eq!(code, Code::UnknownFormat);
        assert!(text.contains("is a pipe") && text.contains("pipe.safetensors"), "{text}");
        assert_eq!(fault(open_files(std::slice::from_ref(&inner))).0, Code::UnknownFormat);
        assert_eq!(OpenFile::open(Path::new("/dev/zero")).unwrap_err().code(), Code::UnknownFormat);
        // Both lie in the folder, where they are taken for its files.
        assert_eq!(fault(open_model(folder.path())).0, Code::UnknownFormat);
    });
    assert_eq!(fault(open_model(&folder.path().join("none"))).0, Code::NotFound);
    assert_eq!(fault(open_files(&[])).0, Code::Usage);
}

#[test]
fn a_pipe_among_the_files_of_an_index() {
    let folder = folder_with(&["a.safetensors"]);
    let pipe = folder.path().join("b.safetensors");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    index(folder.path(), &[("a.safetensors", "a.safetensors"), ("b", "b.safetensors")]);
    within(Duration::from_secs(5), || {
        let (code, text) = fault(open_model(folder.path()));
        assert_eq!(code, Code::UnknownFormat, "{text}");
    });
}

#[test]
fn opened_files_block_like_others_and_close_on_exec() {
    let folder = folder_with(&["a"]);
    let opened = OpenFile::open(&folder.path().join("a")).unwrap();
    let flags = rustix::fs::fcntl_getfl(&opened.local().unwrap().file).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
    assert!(
        rustix::io::fcntl_getfd(&opened.local().unwrap().file)
            .unwrap()
            .contains(rustix::io::FdFlags::CLOEXEC)
    );
}

#[test]
fn links() {
    let folder = folder_with(&["real"]);
    let link = |name: &str, target: &str| -> PathBuf {
        let path = folder.path().join(name);
        symlink(target, &path).unwrap();
        path
    };
    let good = open_model(&link("good.safetensors", "real")).unwrap();
    assert_eq!(good.catalog.files[0].name, "good.safetensors");
    let (code, text) = fault(open_files(&[link("dangling.safetensors", "gone")]));
    assert_eq!(code, Code::NotFound);
    assert!(text.contains("is a link to gone"), "{text}");
    let round = link("round.safetensors", "round.safetensors");
    let (code, text) = fault(open_model(&round));
    assert_eq!(code, Code::Io);
    assert!(text.contains("symbolic links"), "{text}");
}

#[test]
fn a_dangling_link_is_a_missing_shard() {
    let folder = folder_with(&["a.safetensors"]);
    symlink("../../blobs/0123", folder.path().join("b.safetensors")).unwrap();
    index(folder.path(), &[("a.safetensors", "a.safetensors"), ("b", "b.safetensors")]);
    let (code, text) = fault(open_model(folder.path()));
    assert_eq!(code, Code::MissingShard);
    assert!(text.contains("blobs/0123"), "{text}");
}

/// In a child that `no_permission` started as another user.
#[test]
fn child_without_permission() {
    let Ok(path) = std::env::var("FOREBAY_TEST_UNREADABLE") else { return };
    assert_eq!(fault(open_model(Path::new(&path))).0, Code::PermissionDenied);
}

#[test]
fn no_permission() {
    let folder = folder_with(&["a.safetensors"]);
    let path = folder.path().join("a.safetensors");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    if fs::File::open(&path).is_err() {
        assert_eq!(fault(open_model(&path)).0, Code::PermissionDenied);
        return;
    }
    // Root reads everything, so somebody else must try.
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_without_permission"]).env("FOREBAY_TEST_UNREADABLE", &path);
    match child.uid(65534).gid(65534).current_dir("/").output() {
        Ok(run) => assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout)),
        Err(error) => println!("skipped: another user cannot run this test: {error}"),
    }
}

#[test]
fn changes_are_noticed() {
    let folder = folder_with(&["a", "b", "c", "d"]);
    let open = |name: &str| OpenFile::open(&folder.path().join(name)).unwrap();
    let changed = |file: &OpenFile| {
        let error = file.check_unchanged().unwrap_err();
        assert_eq!(error.code(), Code::FileChanged);
        error.to_string()
    };
    let (a, b, c, d) = (open("a"), open("b"), open("c"), open("d"));
    std::thread::sleep(Duration::from_millis(20));
    fs::rename(folder.path().join("b"), folder.path().join("a")).unwrap();
    assert!(changed(&a).contains("replaced or removed"), "{}", changed(&a));
    fs::OpenOptions::new()
        .append(true)
        .open(folder.path().join("c"))
        .unwrap()
        .write_all(b"x")
        .unwrap();
    assert!(changed(&c).contains("size went from"), "{}", changed(&c));
    let writer = fs::OpenOptions::new().write(true).open(folder.path().join("d")).unwrap();
    assert!(d.check_unchanged().is_ok());
    writer.write_all_at(b"x", 3).unwrap();
    assert!(changed(&d).contains("written to"), "{}", changed(&d));
    drop(b);
}

#[test]
fn a_file_that_shrinks_is_an_error_and_not_zeros() {
    let folder = folder_with(&["a"]);
    let path = folder.path().join("a");
    let opened = OpenFile::open(&path).unwrap();
    let mut buffer = vec![0; opened.size() as usize];
    opened.read_exact_at(&mut buffer, 0).unwrap();
    assert_eq!(opened.read_exact_at(&mut buffer, 1).unwrap_err().code(), Code::Truncated);
    assert_eq!(opened.read_exact_at(&mut buffer, u64::MAX - 4).unwrap_err().code(), Code::Io);
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(20).unwrap();
    assert_eq!(opened.read_exact_at(&mut buffer, 0).unwrap_err().code(), Code::FileChanged);
    assert_eq!(read_header(&opened).unwrap_err().code(), Code::FileChanged);
}

#[test]
fn lengths_are_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    for (len, code) in [
        (100_000_000_u64, Code::Truncated),
        (100_000_001, Code::HeaderTooLarge),
        (u64::MAX, Code::HeaderTooLarge),
        (17, Code::Truncated),
    ] {
        fs::write(&path, [&len.to_le_bytes()[..], &[b' '; 16]].concat()).unwrap();
        within(Duration::from_secs(2), || assert_eq!(fault(open_model(&path)).0, code, "{len}"));
    }
    // 100 MB of zeros that take no space.
    let holes = fs::File::create(&path).unwrap();
    holes.write_all_at(&100_000_000_u64.to_le_bytes(), 0).unwrap();
    holes.set_len(1 << 40).unwrap();
    assert_eq!(fault(open_model(&path)).0, Code::InvalidJson);
}

#[test]
fn deep_nesting_is_an_error() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        for deep in [50, 127, 128, 1000, 1_000_000] {
            let value = open.repeat(deep) + "1" + &close.repeat(deep);
            let extra = format!(
                "{{\"w\":{{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0],\"x\":{value}}}}}"
            );
            assert_eq!(parse_header(extra.as_bytes(), 0).is_ok(), deep == 50, "{deep}");
            let name = format!("{{\"w\":{value}}}");
            assert!(parse_header(name.as_bytes(), 0).is_err());
            assert!(parse_header(value.as_bytes(), 0).is_err());
            assert!(parse_header(open.repeat(deep).as_bytes(), 0).is_err());
        }
    }
}

#[test]
fn huge_numbers_are_an_error() {
    let code = |shape: &str, offsets: &str| {
        let json =
            format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}");
        parse_header(json.as_bytes(), 4).unwrap_err().code()
    };
    let digits = "9".repeat(1_000_000);
    assert_eq!(code(&format!("[{digits}]"), "[0,4]"), Code::InvalidJson);
    assert_eq!(code("[1e308]", "[0,4]"), Code::BadField);
    assert_eq!(code("[4]", &format!("[0,{}]", u64::MAX)), Code::ShapeSizeMismatch);
    assert_eq!(code(&format!("[{}]", u64::MAX), &format!("[0,{}]", u64::MAX)), Code::Overflow);
    assert_eq!(
        code(&format!("[{}]", (1_u64 << 61) - 1), &format!("[0,{}]", (1_u64 << 61) - 1)),
        Code::Truncated
    );
    // A million sides, and a message that does not repeat them.
    let sides = vec!["2"; 1_000_000].join(",");
    let json = format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{sides}],\"data_offsets\":[0,4]}}}}");
    let error = parse_header(json.as_bytes(), 4).unwrap_err();
    assert_eq!(error.code(), Code::Overflow);
    assert!(error.render().len() < 1000);
}

#[test]
fn names_do_not_reach_the_terminal_raw() {
    let json = "{\"\\u001b[2J\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,5]}}";
    let text = parse_header(json.as_bytes(), 5).unwrap_err().render();
    assert!(!text.contains('\u{1b}') && text.contains("\\u{1b}"), "{text}");
}

#[test]
fn a_million_tensors() {
    let json = {
        let mut json = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
        for index in 0..1_000_000_usize {
            json.push(',');
            // Not in the order of the names.
            json.push_str(&entry(
                &format!("layers.{}.w", index * 7919 % 1_000_003),
                index,
                index + 1,
            ));
        }
        json + "}"
    };
    assert!(json.len() < 100_000_000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    fs::write(&path, file(&json, &vec![0; 1_000_000])).unwrap();
    drop(json);
    within(Duration::from_secs(120), || {
        let model = open_model(&path).unwrap();
        assert_eq!(model.catalog.tensors.len(), 1_000_000);
        assert_eq!(model.catalog.get("layers.7919.w").unwrap().bytes, 1);
        assert_eq!(model.catalog.find("layers.7919.x"), None);
    });
}

#[test]
fn ten_thousand_missing_files_are_one_error() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> =
        (1..=10_000).map(|at| format!("model-{at:05}-of-10000.safetensors")).collect();
    let pairs: Vec<_> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
    index(folder.path(), &pairs);
    within(Duration::from_secs(30), || {
        let (code, text) = fault(open_model(folder.path()));
        assert_eq!(code, Code::MissingShard);
        assert!(text.contains("10000 of the 10000") && text.contains("and 9800 more"), "{text}");
        assert!(text.len() < 20_000);
    });
}

#[test]
fn too_many_files() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..=65_536).map(|at| format!("{at}.safetensors")).collect();
    let pairs: Vec<_> = names.iter().map(|name| (name.as_str(), name.as_str())).collect();
    index(folder.path(), &pairs);
    assert_eq!(fault(open_model(folder.path())).0, Code::InvalidIndex);
}

#[test]
fn an_index_too_large_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors.index.json");
    fs::File::create(&path).unwrap().set_len((512 << 20) + 1).unwrap();
    within(Duration::from_secs(2), || {
        assert_eq!(fault(open_model(folder.path())).0, Code::InvalidIndex)
    });
}

#[test]
fn unsafe_paths_are_refused_before_anything_is_opened() {
    let folder = folder_with(&["a.safetensors"]);
    let pipe = folder.path().join("pipe.safetensors");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    for bad in
        ["/etc/passwd", "../x.safetensors", "a/../../x.safetensors", "", "a\0.safetensors", "."]
    {
        index(
            folder.path(),
            &[("p", "pipe.safetensors"), ("x", bad), ("y", "missing.safetensors")],
        );
        assert_eq!(fault(open_model(folder.path())).0, Code::UnsafePath, "{bad:?}");
    }
    index(folder.path(), &[("x", "pytorch_model.bin")]);
    let (code, text) = fault(open_model(folder.path()));
    assert_eq!(code, Code::UnknownFormat);
    assert!(text.contains("pickle"), "{text}");
}

#[test]
fn files_of_other_formats() {
    let folder = folder_with(&["a.gguf", "b.bin", "c.json", "nosuffix", "._a.safetensors"]);
    for name in ["a.gguf", "b.bin", "c.json"] {
        assert_eq!(fault(open_model(&folder.path().join(name))).0, Code::UnknownFormat, "{name}");
    }
    // As in a cache, where blobs have no suffix.
    assert!(open_model(&folder.path().join("nosuffix")).is_ok());
    let (code, text) = fault(open_model(folder.path()));
    assert_eq!(code, Code::UnknownFormat);
    assert!(text.contains("b.bin") && text.contains("GGUF"), "{text}");
}

#[test]
fn the_same_file_twice_is_a_duplicate() {
    let folder = folder_with(&["a.safetensors", "b.safetensors"]);
    let (a, b) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
    assert_eq!(fault(open_files(&[a.clone(), a.clone()])).0, Code::DuplicateTensor);
    let model = open_files(&[b, a]).unwrap();
    let names: Vec<_> = model.catalog.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(names, ["b.safetensors", "a.safetensors"]);
    assert_eq!(model.catalog.total_bytes(), 8);
}

#[test]
fn an_empty_index_is_an_empty_model() {
    let folder = tempfile::tempdir().unwrap();
    index(folder.path(), &[]);
    let model = open_model(folder.path()).unwrap();
    assert!(model.files.is_empty() && model.catalog.tensors.is_empty());
}
