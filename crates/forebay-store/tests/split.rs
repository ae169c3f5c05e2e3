//! Records that all nodes share, and data on the drive of each.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_engine::{read_exact_at, write_all_at};
use forebay_error::Code;
use forebay_store::{
    Expect, MemoryStore, NODE_OWN, NODE_RECORDS, PosixStore, SplitStore, Store, StoreSettings,
    create_split, open_store, split_folder, split_url,
};

const DATA: &str = "step-7/00000abc-1_0_0.distcp";
const RECORD: &str = "step-7/.forebay/00000abc-1/begin-0";

fn write(store: &dyn Store, key: &str, bytes: &[u8]) {
    let object = store.create_data(key, bytes.len() as u64).unwrap();
    write_all_at(object.sink(), bytes, 0).unwrap();
    object.seal().unwrap();
}

fn read(store: &dyn Store, key: &str) -> Vec<u8> {
    let source = store.open_data(key).unwrap();
    let mut bytes = vec![0; source.len() as usize];
    read_exact_at(&*source, &mut bytes, 0).unwrap();
    bytes
}

fn keys(store: &dyn Store) -> Vec<String> {
    store.list("", 100).unwrap().into_iter().map(|line| line.key).collect()
}

/// Two nodes with one place of records.
fn nodes() -> (MemoryStore, [MemoryStore; 2], [SplitStore; 2]) {
    let (records, drives) = (MemoryStore::new(), [MemoryStore::new(), MemoryStore::new()]);
    let node =
        |drive: &MemoryStore| SplitStore::new(Arc::new(records.clone()), Arc::new(drive.clone()));
    let stores = [node(&drives[0]), node(&drives[1])];
    (records, drives, stores)
}

#[test]
fn each_node_sees_all_records_and_its_own_data() {
    let (records, drives, [one, two]) = nodes();
    write(&one, DATA, b"of one");
    assert!(one.create(RECORD, b"begun").unwrap());
    assert!(!two.create(RECORD, b"again").unwrap());
    assert_eq!(keys(&one), [RECORD, DATA]);
    assert_eq!(keys(&two), [RECORD]);
    assert_eq!(keys(&records), [RECORD]);
    assert_eq!(keys(&drives[0]), [DATA]);
    assert_eq!(one.list_here("step-7/", 9).unwrap().len(), 1);
    assert_eq!(one.names("step-7/", 9).unwrap().len(), 2);
    assert_eq!(read(&one, DATA), b"of one");
    let error = two.open_data(DATA).map(drop).unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.render().contains("another node"), "{}", error.render());
    assert!(!one.sees_all());
    // A listing of both is bounded by both.
    assert_eq!(one.list("", 1).unwrap_err().code(), Code::Unsupported);
    // What one removes is gone for all, and of data its own.
    two.discard(&[DATA.to_owned(), RECORD.to_owned()]).unwrap();
    assert_eq!(keys(&one), [DATA]);
    assert!(one.remove(DATA).unwrap() && keys(&drives[0]).is_empty());
}

#[test]
fn what_a_drive_says_of_itself_stays_on_it() {
    let (records, drives, [one, two]) = nodes();
    let (name, mark) = (format!("{NODE_OWN}drive"), format!("{NODE_OWN}copies/step-7/x.distcp"));
    assert!(one.create(&name, b"one").unwrap() && two.create(&name, b"two").unwrap());
    one.put(&mark, b"m").unwrap();
    assert_eq!(one.get(&name, 9).unwrap().unwrap().0, b"one");
    assert!(keys(&records).is_empty());
    assert_eq!(keys(&drives[0]), [mark.as_str(), name.as_str()]);
    assert_eq!(keys(&one), keys(&drives[0]));
    // Records are not asked for it, and what is there of that name is nobody's.
    records.put(&format!("{NODE_OWN}odd"), b"x").unwrap();
    assert_eq!(one.list(NODE_OWN, 9).unwrap().len(), 2);
    assert_eq!(one.list_here(NODE_OWN, 9).unwrap().len(), 1);
    let names = |prefix: &str| one.names(prefix, 9).unwrap();
    assert_eq!(names(NODE_OWN), [("copies".to_owned(), true), ("drive".to_owned(), false)]);
    assert_eq!(names(&format!("{NODE_OWN}copies/step-7/")), [("x.distcp".to_owned(), false)]);
    // What comes lies there until it becomes a data file; it never becomes a record.
    let coming = format!("{NODE_OWN}incoming/1");
    write(&one, &coming, b"data");
    let lost = one.publish(&coming, RECORD, &Expect::Absent).unwrap_err();
    assert_eq!(lost.code(), Code::Unsupported);
    one.publish(&coming, DATA, &Expect::Absent).unwrap();
    assert_eq!(read(&one, DATA), b"data");
    one.discard(&[mark, DATA.to_owned()]).unwrap();
    assert_eq!(keys(&drives[0]), [name.as_str()]);
    assert!(two.remove(&name).unwrap() && keys(&drives[1]).is_empty());
}

#[test]
fn what_else_lies_on_a_drive_is_not_seen_and_leftovers_are() {
    let (_, drives, [one, _]) = nodes();
    drives[0].put("step-7/.metadata", b"another job's").unwrap();
    drives[0].put("step-7/.forebay-tmp-1", b"left").unwrap();
    assert_eq!(keys(&one), ["step-7/.forebay-tmp-1"]);
    assert_eq!(one.get("step-7/.metadata", 99).unwrap(), None);
    assert!(one.remove("step-7/.forebay-tmp-1").unwrap());
    assert_eq!(keys(&drives[0]), ["step-7/.metadata"]);
}

#[test]
fn nothing_is_published_from_one_place_to_the_other() {
    let (_, _, [one, _]) = nodes();
    one.put("step-7/staged", b"1").unwrap();
    let error = one.publish("step-7/staged", DATA, &Expect::Absent).unwrap_err();
    assert_eq!(error.code(), Code::Unsupported);
    assert_eq!(keys(&one), ["step-7/staged"]);
}

#[test]
fn data_that_are_nearer_are_read_there_and_written_nowhere_else() {
    let (whole, drive) = (MemoryStore::new(), MemoryStore::new());
    let near = SplitStore::near(Arc::new(whole.clone()), Arc::new(drive.clone()));
    let other = "step-7/00000abc-1_1_0.distcp";
    write(&whole, DATA, b"far");
    write(&whole, other, b"only far");
    write(&drive, DATA, b"near");
    drive.put("step-7/.metadata", b"not this").unwrap();
    whole.put("step-7/.metadata", b"this").unwrap();
    assert_eq!((read(&near, DATA), read(&near, other)), (b"near".to_vec(), b"only far".to_vec()));
    assert_eq!(read(&near, "step-7/.metadata"), b"this");
    assert!(near.sees_all());
    assert_eq!(keys(&near), keys(&whole));
    assert!(near.remove(DATA).unwrap());
    assert_eq!(keys(&drive), ["step-7/.metadata", DATA], "the node's own stays");
    write(&near, "step-8/00000abc-2_0_0.distcp", b"new");
    assert!(keys(&whole).contains(&"step-8/00000abc-2_0_0.distcp".to_owned()));
}

fn at(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

#[test]
fn a_url_leads_to_both_and_folders_are_made_where_those_above_are() {
    let above = tempfile::tempdir().unwrap();
    let (shared, drive) = (above.path().join("all of them"), above.path().join("drive"));
    let url = split_url(at(&shared), at(&drive), false);
    let open = |url: &str| open_store(url, &StoreSettings::default());
    assert_eq!(open(&url).err().unwrap().code(), Code::NotFound, "looking makes nothing");
    assert!(!shared.exists() && !drive.exists());
    create_split(&url, &StoreSettings::default()).unwrap();
    create_split(&url, &StoreSettings::default()).unwrap();
    assert_eq!(split_folder(&url).unwrap(), Some(drive.clone()));
    assert_eq!(split_folder("s3://b/x").unwrap(), None);
    let store = open(&url).unwrap();
    assert_eq!(store.name(), at(&drive));
    write(&*store, DATA, b"bytes");
    store.put("step-7/.metadata", b"commit").unwrap();
    let records = shared.join(NODE_RECORDS);
    assert!(records.join("step-7/.metadata").is_file() && drive.join(DATA).is_file());
    // No step of the place itself.
    let whole = PosixStore::open(&shared).unwrap();
    assert!(whole.names("", 9).unwrap().iter().all(|(name, _)| !name.starts_with("step-")));
    // A step by itself.
    let step = open(&format!("{url}/step-7")).unwrap();
    assert_eq!(read(&*step, "00000abc-1_0_0.distcp"), b"bytes");
    assert_eq!(read(&*step, ".metadata"), b"commit");
    // Reading nearer.
    std::fs::create_dir_all(shared.join("step-7")).unwrap();
    std::fs::write(shared.join("step-7/.metadata"), b"whole").unwrap();
    let near = open(&split_url(at(&shared), at(&drive), true)).unwrap();
    assert_eq!(read(&*near, "step-7/.metadata"), b"whole");
    assert_eq!(read(&*near, DATA), b"bytes");
}

/// The place of records is not mounted, or is another: nothing is listed, by whoever has it open, either.
#[test]
fn a_drive_goes_with_its_own_records_alone() {
    let above = tempfile::tempdir().unwrap();
    let (shared, drive) = (above.path().join("shared"), above.path().join("drive"));
    let url = split_url(at(&shared), at(&drive), false);
    let open = |url: &str| open_store(url, &StoreSettings::default());
    create_split(&url, &StoreSettings::default()).unwrap();
    // A whole checkpoint beside the records.
    std::fs::create_dir(shared.join("step-7")).unwrap();
    std::fs::write(shared.join("step-7/.metadata"), b"whole").unwrap();
    let records = shared.join(NODE_RECORDS);
    let (away, other) = (above.path().join("away"), above.path().join("other"));
    std::fs::rename(&shared, &away).unwrap();
    std::fs::create_dir(&shared).unwrap();
    let create = |url: &str| create_split(url, &StoreSettings::default());
    for place in [&shared, &other] {
        for made in [
            create(&split_url(at(place), at(&drive), false)),
            open(&split_url(at(place), at(&drive), false)).map(drop),
        ] {
            let error = made.unwrap_err();
            assert_eq!(error.code(), Code::NotShared, "{error}");
            let told = error.render();
            for says in [at(&drive), at(&place.join(NODE_RECORDS)), "mounted?"] {
                assert!(told.contains(says), "{told}");
            }
        }
    }
    assert!(
        !other.exists() && !shared.join(".forebay").exists(),
        "a drive's records are not made anew"
    );
    create(&split_url(at(&other), at(&above.path().join("drive2")), false)).unwrap();
    let mixed = open(&split_url(at(&other), at(&drive), false)).err().unwrap();
    assert_eq!(mixed.code(), Code::NotShared);
    assert!(mixed.render().contains(at(&drive)) && mixed.render().contains("mounted?"));
    std::fs::remove_dir(&shared).unwrap();
    std::fs::rename(&away, &shared).unwrap();
    let opened = open(&url).unwrap();
    std::fs::remove_file(records.join(".forebay/place")).unwrap();
    assert_eq!(opened.list("", 99).unwrap_err().code(), Code::NotShared);
    let new = above.path().join("drive9");
    for (url, code) in [
        (split_url(at(&shared), at(&above.path().join("no/mount")), false), Code::NotFound),
        (split_url(at(&above.path().join("no/mount")), at(&drive), false), Code::NotShared),
        (split_url(at(&above.path().join("no/mount")), at(&new), false), Code::NotFound),
        (split_url(at(&drive), at(&shared), false), Code::AlreadyExists),
        (split_url(at(&shared), at(&drive), true), Code::Usage),
        ("/a/folder".to_owned(), Code::Usage),
    ] {
        assert_eq!(
            create_split(&url, &StoreSettings::default()).unwrap_err().code(),
            code,
            "{url}"
        );
    }
    assert_eq!(split_folder(&url).unwrap().unwrap(), PathBuf::from(&drive));
}

#[test]
fn a_drive_that_is_emptied_while_it_is_in_use_stays_the_drive() {
    let above = tempfile::tempdir().unwrap();
    let (drive, shared) = (above.path().join("drive"), above.path().join("shared"));
    let url = split_url(at(&shared), at(&drive), false);
    let settings = StoreSettings::default();
    create_split(&url, &settings).unwrap();
    let store = open_store(&url, &settings).unwrap();
    write(&*store, DATA, b"of one");
    std::fs::remove_dir_all(drive.join(".forebay")).unwrap();
    assert_eq!(keys(&*store).last().map(String::as_str), Some(DATA));
    assert!(drive.join(".forebay/place").is_file());
    // Whoever comes next takes it for what it is.
    create_split(&url, &settings).unwrap();
    assert_eq!(read(&*open_store(&url, &settings).unwrap(), DATA), b"of one");
}
