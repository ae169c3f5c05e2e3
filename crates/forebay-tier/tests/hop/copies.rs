//! Copies of what is on a node's drive on that of another.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{Adoption, FileRef};
use forebay_checkpoint::progress::Unwatched;
use forebay_error::Code;
use forebay_store::{MemoryStore, NODE_OWN, PosixStore, SplitStore, Store};
use forebay_tier::copies::{
    Announcement, Begun, DriveId, Giving, Peers, Receiver, announce, drive_id, mark_lacking, marks,
    peer, withdraw,
};
use forebay_tier::hop::{Arrival, HopOptions, HopReport, Share, Side, hop};
use forebay_tier::limits::Priority;
use forebay_tier::nearest::ranks_here;

use crate::world::{data_bytes, files, objects, options, side, source, split};

/// Two nodes with step 7, each with the data of a rank.
struct Job {
    whole: MemoryStore,
    records: MemoryStore,
    drives: Vec<MemoryStore>,
    nodes: Vec<Side>,
}

fn job() -> Job {
    let whole = source();
    let (records, drives) = split(&whole);
    let node = |drive: &MemoryStore| {
        side(Arc::new(SplitStore::new(Arc::new(records.clone()), Arc::new(drive.clone()))))
    };
    let nodes = drives.iter().map(node).collect();
    Job { whole, records, drives, nodes }
}

impl Job {
    fn id(&self, node: usize) -> DriveId {
        drive_id(&self.nodes[node].root).unwrap()
    }

    fn announce(&self, node: usize) {
        let told = Announcement {
            host: format!("node-{node}"),
            job: "run7".to_owned(),
            url: format!("https://node-{node}:9464"),
            gone_seconds: 120,
        };
        announce(&self.nodes[node].root, self.id(node), &told).unwrap();
    }

    /// Copies all that is a node's own to another.
    fn copy(&self, from: usize, to: usize) -> Vec<FileRef> {
        let giving = Giving::of(&self.nodes[from].root, 7).unwrap();
        let receiver = Receiver::new(self.nodes[to].clone(), 1 << 16);
        for file in giving.own() {
            let begun = receiver.begin(7, &file.name, file.bytes, self.id(from)).unwrap();
            let Begun::Incoming(mut incoming) = begun else { panic!("{file:?} is there") };
            let mut each = |part: Vec<u8>| incoming.write(&part);
            let from = &self.nodes[from];
            giving.read(from, file, 50_000, Priority::Newest, &mut each).unwrap();
            incoming.finish().unwrap();
        }
        giving.own().to_vec()
    }

    fn bring(&self, node: usize, to: &MemoryStore) -> HopReport {
        let there = side(Arc::new(to.clone()));
        hop(&self.nodes[node], &there, 7, &options(Share::all()), &Unwatched).unwrap()
    }

    /// What lies beside the data on a drive.
    fn own_records(&self, node: usize) -> Vec<String> {
        objects(&self.drives[node], NODE_OWN).into_keys().collect()
    }
}

#[test]
fn a_copy_is_the_same_file_and_known_as_a_copy() {
    let job = job();
    let copied = job.copy(1, 0);
    assert!(!copied.is_empty());
    for file in &copied {
        let key = format!("step-7/{}", file.name);
        let bytes = |drive: usize| job.drives[drive].get(&key, 1 << 30).unwrap().unwrap().0;
        assert_eq!(bytes(0), bytes(1), "{key}");
    }
    assert_eq!(ranks_here(&job.nodes[0].root, 7).unwrap(), [0, 1].into());
    let held = marks(&job.nodes[0].root).unwrap();
    assert_eq!(held.len(), copied.len());
    assert!(held.iter().all(|mark| mark.of == job.id(1) && mark.step == 7 && !mark.lacking));
    // It is not copied on.
    let own = Giving::of(&job.nodes[0].root, 7).unwrap();
    assert!(own.own().iter().all(|file| !copied.contains(file)) && !own.own().is_empty());
    // All that is said of it is on the drive, and nothing is left of its way.
    assert_eq!(job.own_records(0).len(), copied.len(), "{:?}", job.own_records(0));
    assert_eq!(job.own_records(1), [format!("{NODE_OWN}drive")]);
    assert_ne!(job.id(0), job.id(1));
    // Again, it is there.
    let receiver = Receiver::new(job.nodes[0].clone(), 1 << 16);
    let again = receiver.begin(7, &copied[0].name, copied[0].bytes, job.id(1)).unwrap();
    assert!(matches!(again, Begun::There));
    let there = receiver.files(7).unwrap();
    assert!(copied.iter().all(|file| there.contains(file)) && there.len() > copied.len());
}

#[test]
fn who_has_a_copy_brings_it_only_where_its_owner_is_gone() {
    let job = job();
    job.copy(1, 0);
    job.announce(1);
    job.announce(0);
    let mut peers = Peers::default();
    let mut look = || peers.look(&job.nodes[0].root, &BTreeSet::new()).unwrap();
    assert_eq!(look().iter().filter(|peer| peer.is_alive()).count(), 2);
    assert_eq!(look(), look());
    assert_eq!(peer(&job.nodes[1].root, job.id(1)).unwrap().unwrap().told.host, "node-1");
    let to = MemoryStore::new();
    let first = job.bring(0, &to);
    assert!(matches!(first.arrival, Arrival::Waiting { files } if files > 0), "{first:?}");
    assert!(first.bytes_sent < data_bytes(&job.whole));
    assert_eq!(job.bring(0, &to).bytes_sent, 0, "it only looks");
    // It is late, and then too late.
    job.records.advance(Duration::from_secs(119));
    assert_eq!(job.bring(0, &to).bytes_sent, 0);
    job.records.advance(Duration::from_secs(1));
    let second = job.bring(0, &to);
    assert_eq!(second.arrival, Arrival::Committed { by_us: true, durable: true });
    assert_eq!(first.bytes_sent + second.bytes_sent, data_bytes(&job.whole));
    assert_eq!(files(&to, 7), files(&job.whole, 7));
}

#[test]
fn what_an_owner_that_lives_has_lost_is_brought_by_who_has_the_copy() {
    let job = job();
    let copied = job.copy(1, 0);
    job.announce(1);
    let lost = format!("step-7/{}", copied[0].name);
    job.drives[1].remove(&lost).unwrap();
    let to = MemoryStore::new();
    assert!(matches!(job.bring(0, &to).arrival, Arrival::Waiting { .. }));
    let mark = marks(&job.nodes[0].root).unwrap().into_iter().find(|m| m.name == copied[0].name);
    mark_lacking(&job.nodes[0].root, &mark.unwrap()).unwrap();
    assert!(matches!(job.bring(0, &to).arrival, Arrival::Committed { by_us: true, .. }));
    assert_eq!(files(&to, 7), files(&job.whole, 7));
}

#[test]
fn two_nodes_with_copies_alone_bring_a_lost_node_s_at_once() {
    let mut job = job();
    for spare in [2, 3] {
        let (records, drive) = (job.records.clone(), MemoryStore::new());
        job.nodes.push(side(Arc::new(SplitStore::new(Arc::new(records), Arc::new(drive.clone())))));
        job.drives.push(drive);
        job.copy(1, spare);
    }
    for _ in 0..8 {
        let to = MemoryStore::new();
        job.bring(0, &to);
        std::thread::scope(|scope| {
            let (job, to) = (&job, &to);
            for spare in [2, 3] {
                scope.spawn(move || job.bring(spare, to));
            }
        });
        assert!(matches!(job.bring(2, &to).arrival, Arrival::Committed { .. }));
        assert_eq!(files(&to, 7), files(&job.whole, 7));
    }
}

#[test]
fn nothing_but_true_files_of_committed_steps_is_taken() {
    let job = job();
    let receiver = Receiver::new(job.nodes[0].clone(), 1 << 16);
    let file = Giving::of(&job.nodes[1].root, 7).unwrap().own()[0].clone();
    let of = job.id(1);
    let before = objects(&job.drives[0], "step-7/");
    let begin = |step, name: &str, bytes| receiver.begin(step, name, bytes, of).map(drop);
    assert_eq!(begin(8, &file.name, file.bytes).unwrap_err().code(), Code::NotCommitted);
    let manifest = Adoption::read(&job.nodes[0].root, 7).unwrap();
    let manifest = manifest.files().iter().find(|f| f.name == manifest.manifest()).unwrap();
    for name in ["", ".", "..", "../x.distcp", ".metadata", "x.distcp", &manifest.name] {
        let error = begin(7, name, manifest.bytes).unwrap_err();
        assert_eq!(error.code(), Code::NotFound, "{name}");
    }
    for bytes in [0, file.bytes - 1, file.bytes + 1, u64::MAX] {
        assert_eq!(begin(7, &file.name, bytes).unwrap_err().code(), Code::Usage);
    }
    let incoming = || match receiver.begin(7, &file.name, file.bytes, of).unwrap() {
        Begun::Incoming(incoming) => incoming,
        Begun::There => panic!("it is there"),
    };
    let whole = job.drives[1].get(&format!("step-7/{}", file.name), 1 << 30).unwrap().unwrap().0;
    // Too little, too much, something else, and one that is broken off.
    let mut short = incoming();
    short.write(&whole[1..]).unwrap();
    assert_eq!(short.left(), 1);
    assert_eq!(short.finish().unwrap_err().code(), Code::Truncated);
    let mut long = incoming();
    long.write(&whole).unwrap();
    assert_eq!(long.write(b"x").unwrap_err().code(), Code::Usage);
    drop(long);
    let mut wrong = incoming();
    let mut bytes = whole.clone();
    bytes[7] ^= 1;
    wrong.write(&bytes).unwrap();
    assert_eq!(wrong.finish().unwrap_err().code(), Code::Checksum);
    // The step goes while its last bytes come.
    let mut late = incoming();
    late.write(&whole).unwrap();
    let store = &job.nodes[0].root.store;
    let metadata = store.get("step-7/.metadata", 1 << 30).unwrap().unwrap().0;
    store.remove("step-7/.metadata").unwrap();
    assert_eq!(late.finish().unwrap_err().code(), Code::NotCommitted);
    store.put("step-7/.metadata", &metadata).unwrap();
    assert_eq!(objects(&job.drives[0], "step-7/"), before);
    assert_eq!(job.own_records(0), [] as [String; 0], "nothing is left");
    let mut good = incoming();
    good.write(&whole).unwrap();
    good.finish().unwrap();
}

#[test]
fn a_damaged_file_is_never_sent_whole() {
    let job = job();
    let giving = Giving::of(&job.nodes[1].root, 7).unwrap();
    let file = giving.own().iter().max_by_key(|file| file.bytes).unwrap();
    let key = format!("step-7/{}", file.name);
    let mut bytes = job.drives[1].get(&key, 1 << 30).unwrap().unwrap().0;
    bytes[0] ^= 1;
    job.drives[1].put(&key, &bytes).unwrap();
    let mut sent = 0;
    let mut each = |part: Vec<u8>| {
        sent += part.len() as u64;
        Ok(())
    };
    let read = giving.read(&job.nodes[1], file, 50_000, Priority::Archive, &mut each);
    assert_eq!(read.unwrap_err().code(), Code::Checksum);
    assert!(sent > 0 && sent < file.bytes);
}

#[test]
fn copies_of_what_is_in_one_place_go_and_nothing_else_does() {
    let job = job();
    let copied = job.copy(1, 0);
    let root = &job.nodes[0].root;
    let receiver = Receiver::new(job.nodes[0].clone(), 1 << 16);
    let attempt = Adoption::read(root, 7).unwrap().attempt().to_string();
    let own = Giving::of(root, 7).unwrap().own().to_vec();
    // A mark whose file is about to come.
    let store = &job.drives[0];
    let mark = format!("{NODE_OWN}copies/step-9/00000abc-2_1_0.distcp");
    store.put(&mark, br#"{"of":"00000000000000aa"}"#).unwrap();
    let others = [(8, attempt.clone()), (7, "00000abc-9".to_owned())].into();
    let tidied = receiver.tidy(&others).unwrap();
    assert!(tidied.removed.is_empty(), "{tidied:?}");
    assert_eq!(tidied.held.len(), copied.len());
    let landed: BTreeSet<_> = [(7, attempt)].into();
    let tidied = receiver.tidy(&landed).unwrap();
    assert_eq!(tidied.removed.len(), copied.len());
    assert!(tidied.held.is_empty());
    assert_eq!(Receiver::new(job.nodes[0].clone(), 1).files(7).unwrap(), own);
    assert_eq!(job.own_records(0), [mark]);
    job.drives[0].advance(Duration::from_secs(119));
    receiver.tidy(&landed).unwrap();
    assert_eq!(job.own_records(0).len(), 1);
    job.drives[0].advance(Duration::from_secs(1));
    receiver.tidy(&landed).unwrap();
    assert_eq!(job.own_records(0), [] as [String; 0]);
    assert_eq!(Receiver::new(job.nodes[0].clone(), 1).files(7).unwrap(), own);
}

#[test]
fn what_came_of_a_copy_goes_unless_it_is_coming() {
    let job = job();
    let file = Giving::of(&job.nodes[1].root, 7).unwrap().own()[0].clone();
    let receiver = Receiver::new(job.nodes[0].clone(), 1 << 16);
    let begun = receiver.begin(7, &file.name, file.bytes, job.id(1)).unwrap();
    let left = format!("{NODE_OWN}incoming/0123456789abcdef");
    job.drives[0].put(&left, b"half").unwrap();
    let grace = Duration::from_secs(60);
    receiver.collect(grace).unwrap();
    assert_eq!(job.own_records(0).len(), 2);
    job.drives[0].advance(grace);
    receiver.collect(grace).unwrap();
    assert!(job.own_records(0).len() == 1 && !job.own_records(0).contains(&left));
    drop(begun);
    assert_eq!(job.own_records(0), [] as [String; 0]);
}

#[test]
fn what_is_announced_is_read_once_unless_it_is_doubted() {
    let job = job();
    job.announce(0);
    job.announce(1);
    let root = &job.nodes[0].root;
    let (mut peers, none) = (Peers::default(), BTreeSet::new());
    let host = |found: &[forebay_tier::copies::Peer]| {
        found.iter().find(|peer| peer.drive == job.id(1)).map(|peer| peer.told.host.clone())
    };
    assert_eq!(host(&peers.look(root, &none).unwrap()).unwrap(), "node-1");
    let told = Announcement {
        host: "moved".to_owned(),
        job: "run7".to_owned(),
        url: "https://moved:1".to_owned(),
        gone_seconds: 120,
    };
    announce(root, job.id(1), &told).unwrap();
    assert_eq!(host(&peers.look(root, &none).unwrap()).unwrap(), "node-1");
    let doubted = [job.id(1)].into();
    assert_eq!(host(&peers.look(root, &doubted).unwrap()).unwrap(), "moved");
    job.records.put(&format!(".forebay/peers/{}/told", job.id(1)), b"{").unwrap();
    assert_eq!(host(&peers.look(root, &doubted).unwrap()), None, "what cannot be read is nobody");
    announce(root, job.id(1), &told).unwrap();
    withdraw(root, job.id(0)).unwrap();
    assert_eq!(peers.look(root, &none).unwrap().len(), 1);
    // After a week nobody expects it back.
    job.records.advance(Duration::from_secs(7 * 24 * 3600));
    assert_eq!(peers.look(root, &none).unwrap(), []);
    assert!(!objects(&job.records, "").keys().any(|key| key.starts_with(".forebay/peers/")));
}

#[test]
fn a_mark_or_an_announcement_that_is_no_record_hides_no_others() {
    let job = job();
    let copied = job.copy(1, 0);
    job.announce(0);
    job.announce(1);
    let long = vec![b' '; 5000];
    job.drives[0].put(&format!("{NODE_OWN}copies/step-7/{}", copied[0].name), &long).unwrap();
    job.records.put(".forebay/peers/00000000000000aa/told", &long).unwrap();
    let found = Peers::default().look(&job.nodes[0].root, &BTreeSet::new()).unwrap();
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(marks(&job.nodes[0].root).unwrap().len(), copied.len());
    let own = Giving::of(&job.nodes[0].root, 7).unwrap();
    assert!(own.own().iter().all(|file| file.name != copied[0].name), "it is a copy all the same");
    // Of whom is not known, so this node brings it.
    let to = MemoryStore::new();
    assert!(job.bring(0, &to).bytes_sent >= copied[0].bytes);
}

#[test]
fn a_copy_that_cannot_be_looked_at_keeps_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let drive = Arc::new(PosixStore::open(folder.path()).unwrap());
    let mark = |step: u64| format!("{NODE_OWN}copies/step-{step}/00000abc-2_1_0.distcp");
    let file = |step: u64| format!("step-{step}/00000abc-2_1_0.distcp");
    for step in [5, 7] {
        drive.put(&mark(step), br#"{"of":"00000000000000aa"}"#).unwrap();
    }
    drive.put(&file(7), b"a copy").unwrap();
    // A folder where the file of the first is to be.
    std::fs::create_dir_all(folder.path().join(file(5)).join("x")).unwrap();
    let store = SplitStore::new(Arc::new(MemoryStore::new()), Arc::clone(&drive) as Arc<dyn Store>);
    let receiver = Receiver::new(side(Arc::new(store)), 1 << 16);
    let held = receiver.tidy(&BTreeSet::new()).unwrap();
    assert_eq!(held.held.len(), 1);
    assert!(held.trouble.is_some());
    let landed = [5, 7].map(|step| (step, "00000abc-2".to_owned())).into();
    let tidied = receiver.tidy(&landed).unwrap();
    assert_eq!(tidied.removed, [(7, "00000abc-2_1_0.distcp".to_owned())]);
    assert!(tidied.trouble.is_some());
    assert!(drive.get(&mark(5), 99).unwrap().is_some(), "as long as there is something");
    assert!(drive.get(&mark(7), 99).unwrap().is_none());
}

#[test]
fn what_is_damaged_at_its_owner_is_brought_by_who_has_the_copy() {
    // One has the data of both ranks, another copies of them.
    let mut job = job();
    for (key, bytes) in objects(&job.drives[0], "step-7/") {
        job.drives[1].put(&key, &bytes).unwrap();
    }
    let (records, drive) = (job.records.clone(), MemoryStore::new());
    job.nodes[0] = side(Arc::new(SplitStore::new(Arc::new(records), Arc::new(drive.clone()))));
    job.drives[0] = drive;
    let copied = job.copy(1, 0);
    job.announce(1);
    let (bad, rest) = copied.split_first().unwrap();
    assert!(!rest.is_empty());
    let key = format!("step-7/{}", bad.name);
    let mut bytes = job.drives[1].get(&key, 1 << 30).unwrap().unwrap().0;
    bytes[9] ^= 1;
    job.drives[1].put(&key, &bytes).unwrap();
    let (to, receiver) = (MemoryStore::new(), Receiver::new(job.nodes[1].clone(), 1 << 16));
    assert!(receiver.files(7).unwrap().contains(bad), "nobody has looked");
    let there = side(Arc::new(to.clone()));
    let one_by_one = HopOptions { files_at_once: 1, ..options(Share::all()) };
    let error = hop(&job.nodes[1], &there, 7, &one_by_one, &Unwatched).unwrap_err();
    assert_eq!(error.code(), Code::Checksum);
    let arrived = |file: &FileRef| objects(&to, "").contains_key(&format!("step-7/{}", file.name));
    assert!(rest.iter().all(arrived) && !arrived(bad), "the others are brought");
    let files_there = receiver.files(7).unwrap();
    assert!(!files_there.contains(bad) && rest.iter().all(|file| files_there.contains(file)));
    let held = marks(&job.nodes[0].root).unwrap();
    mark_lacking(&job.nodes[0].root, held.iter().find(|m| m.name == bad.name).unwrap()).unwrap();
    assert!(matches!(job.bring(0, &to).arrival, Arrival::Committed { by_us: true, .. }));
    assert_eq!(files(&to, 7), files(&job.whole, 7));
    // The note goes with the file.
    receiver.tidy(&BTreeSet::new()).unwrap();
    assert_eq!(job.own_records(1).len(), 2, "{:?}", job.own_records(1));
    job.drives[1].remove(&key).unwrap();
    receiver.tidy(&BTreeSet::new()).unwrap();
    assert_eq!(job.own_records(1).len(), 1);
}
