//! Checkpoints in a bucket of a real S3 server: saved, raced for, read back by ranges, refused where it cannot be.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

#[path = "bucket_cases/listing.rs"]
mod listing;
#[path = "bucket_cases/open.rs"]
mod open;
mod save_support;
#[path = "../../forebay-store/tests/servers/mod.rs"]
mod servers;
#[path = "bucket_cases/uploads.rs"]
mod uploads;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Barrier, LazyLock};
use std::time::Duration;

use forebay_checkpoint::commit::{
    Assembled, Attempt, AttemptId, Committed, FileRef, Policy, Root, RunId, Spec, StructureHash,
    SystemClock, numbers,
};
use forebay_checkpoint::manifest::Manifest;
use forebay_checkpoint::open::{Checkpoint, verify_folder};
use forebay_checkpoint::progress::Unwatched;
use forebay_checkpoint::save::{OurMetadata, Seal};
use forebay_engine::{read_exact_at, write_all_at};
use forebay_error::{Code, Result};
use forebay_store::{ObjectStore, Store};
use forebay_tensor::Region;
use save_support::{Rank, bytes};
use servers::{Reached, fresh_url, reached};
use sha2::{Digest, Sha256};

static SERVER: LazyLock<Option<Reached>> =
    LazyLock::new(|| reached(servers::s3s()).or_else(|| reached(servers::moto())));

/// A rank's own client, as processes have.
fn root(url: &str, address: SocketAddr) -> Root {
    let store = ObjectStore::open(url, &servers::settings(address)).unwrap();
    Root {
        store: Arc::new(store),
        clock: Arc::new(SystemClock::default()),
        identify: Arc::new(OurMetadata),
    }
}

const SHAPE: [u64; 2] = [3000, 1500];

fn shard(number: u64, world: u64) -> Region {
    Region::shard(&SHAPE, 0, number, world).unwrap()
}

fn save_all(url: &str, address: SocketAddr, world: u32, save: u32, seed: u64) -> Vec<Result<()>> {
    std::thread::scope(|scope| {
        let one = |number: u32| {
            scope.spawn(move || {
                let mut rank = Rank::new();
                let region = shard(number.into(), world.into());
                rank.tensor("model.large", &SHAPE, region, seed + u64::from(number));
                rank.object(&format!("object{number}"), b"\x80\x02K\x2a.");
                save_support::save(&root(url, address), rank, (number, world), save)
            })
        };
        let ranks: Vec<_> = (0..world).map(one).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn large_of(world: u64, seed: u64) -> Vec<u8> {
    let part = |number| bytes(seed + number, shard(number, world).elements() * 4);
    (0..world).flat_map(part).collect()
}

/// By ranges of the bucket: `.metadata` leads to the manifest, that to every block.
fn check_ranges(store: &dyn Store) {
    let open = |name: &str| store.open_data(&format!("step-7/{name}")).unwrap();
    let seal = Seal::find(open(".metadata").as_ref()).unwrap().unwrap();
    let manifest = Manifest::open(open(&seal.manifest), Some(&seal.hash)).unwrap();
    let files = manifest.files().unwrap();
    let mut blocks = 0;
    for entry in manifest.entries().unwrap() {
        for chunk in entry.chunks() {
            let data = chunk.data.as_ref().unwrap();
            let mut own = vec![0; usize::try_from(data.bytes).unwrap()];
            let file = open(&files[chunk.file as usize].name);
            read_exact_at(file.as_ref(), &mut own, data.offset).unwrap();
            let crcs: Vec<u32> = own.chunks(1 << 20).map(forebay_format::crc::crc32).collect();
            assert_eq!(crcs, data.crcs, "{}", entry.name);
            blocks += crcs.len();
        }
    }
    assert!(blocks > 15, "{blocks}");
}

/// Every object of the step as a file.
fn download(store: &dyn Store, into: &Path) {
    for line in store.list("step-7/", 1000).unwrap() {
        let target = into.join(&line.key);
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        let source = store.open_data(&line.key).unwrap();
        let mut bytes = vec![0; usize::try_from(line.bytes).unwrap()];
        read_exact_at(source.as_ref(), &mut bytes, 0).unwrap();
        std::fs::write(target, bytes).unwrap();
    }
}

#[test]
fn ranks_save_to_a_bucket_and_every_byte_comes_back() {
    let Some(server) = SERVER.as_ref() else { return };
    let url = fresh_url();
    for (save, seed) in [(1, 5), (2, 6)] {
        for saved in save_all(&url, server.in_turn, 2, save, seed) {
            saved.unwrap();
        }
        let root = root(&url, server.in_turn);
        check_ranges(root.store.as_ref());
        assert_eq!(numbers(&root).unwrap(), [7]);
        let folder = tempfile::tempdir().unwrap();
        download(root.store.as_ref(), folder.path());
        let step = folder.path().join("step-7");
        let verified = verify_folder(&step, &Unwatched).unwrap();
        assert!(verified.is_sound(), "{:?}", verified.faults);
        let own = Checkpoint::open(&step).unwrap();
        let whole = own.read_tensor(own.get("model.large").unwrap()).unwrap();
        assert!(whole == large_of(2, seed), "save {save}");
    }
}

/// `FOREBAY_TEST_PYTHON` is an interpreter with torch and s3fs.
#[test]
fn stock_torch_reads_what_is_in_the_bucket() {
    let Some(server) = SERVER.as_ref() else { return };
    let Some(python) = servers::program("FOREBAY_TEST_PYTHON") else { return };
    let url = fresh_url();
    for saved in save_all(&url, server.in_turn, 2, 1, 5) {
        saved.unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/read_bucket.py");
    let read = std::process::Command::new(python)
        .arg(script)
        .args([format!("{url}/step-7"), format!("http://{}", server.in_turn)])
        .args(SHAPE.map(|size| size.to_string()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&read.stdout);
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let digest: String =
        Sha256::digest(large_of(2, 5)).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(said.trim(), format!("{digest} 42"));
}

fn attempt_of(root: &Root, save: u32) -> (AttemptId, Attempt) {
    let id = AttemptId { run: RunId(u32::from(b'r')), save };
    let spec = Spec {
        folder: "step-3".to_owned(),
        step: 3,
        attempt: id,
        rank: 0,
        world: 1,
        structure: StructureHash([7; 32]),
        epoch: 0,
        parent: None,
        part_bytes: 256,
        who: format!("writer {save}"),
    };
    (id, Attempt::begin(root, &Policy::default(), None, spec).unwrap())
}

fn commit(mut attempt: Attempt, id: AttemptId) -> Result<Committed> {
    let (name, file) = attempt.data_file(0, 100)?;
    write_all_at(file.sink(), &[7; 100], 0)?;
    file.seal()?;
    attempt.publish_part(name.as_bytes())?;
    attempt.wait_or_commit(&mut |_| {
        Ok(Assembled {
            metadata: format!("{id}").into_bytes(),
            manifest: b"manifest".to_vec(),
            files: vec![FileRef { name: name.clone(), bytes: 100 }],
        })
    })
}

#[test]
fn one_of_many_commits_of_a_step_wins() {
    const WRITERS: u32 = 6;
    let Some(server) = SERVER.as_ref() else { return };
    for round in 0..3 {
        let url = format!("{}/{round}", fresh_url());
        let begun = Barrier::new(WRITERS as usize);
        let ends: Vec<_> = std::thread::scope(|scope| {
            let writer = |save| {
                let (begun, url) = (&begun, &url);
                scope.spawn(move || {
                    let root = root(url, server.in_turn);
                    let (id, attempt) = attempt_of(&root, save);
                    begun.wait();
                    (id, commit(attempt, id).map(drop).map_err(|error| error.code()))
                })
            };
            let writers: Vec<_> = (0..WRITERS).map(writer).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let winners: Vec<_> = ends.iter().filter(|(_, end)| end.is_ok()).collect();
        assert_eq!(winners.len(), 1, "{ends:?}");
        let lost = ends.iter().filter(|(_, end)| *end == Err(Code::LostCommit)).count();
        assert_eq!(lost, WRITERS as usize - 1, "{ends:?}");
        let root = root(&url, server.in_turn);
        let (there, _) = root.store.get("step-3/.metadata", 1000).unwrap().unwrap();
        assert_eq!(there, winners[0].0.to_string().into_bytes());
    }
}

#[test]
fn a_store_that_ignores_preconditions_gets_no_checkpoint() {
    let Some(server) = servers::juicefs() else { return };
    let url = fresh_url();
    let ends = save_all(&url, server.address, 1, 1, 5);
    let error = ends[0].as_ref().unwrap_err();
    assert_eq!(error.code(), Code::Unsupported, "{error:?}");
    assert!(!error.hints().is_empty());
    let root = root(&url, server.address);
    assert_eq!(root.store.get("step-7/.metadata", 1000).unwrap(), None);
}

#[test]
fn a_save_goes_through_a_store_in_trouble() {
    let Some(server) = SERVER.as_ref() else { return };
    let count = std::sync::atomic::AtomicU32::new(0);
    // Through the proxy that has changes pass in turn, so that creates stay atomic.
    let troubled = servers::proxy::start(server.in_turn, move |_| {
        use servers::proxy::Action;
        match count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) % 11 {
            3 => Action::Answer(503, "SlowDown"),
            6 => Action::LoseReply,
            9 => Action::Delay(Duration::from_millis(50)),
            _ => Action::Pass,
        }
    });
    let url = fresh_url();
    for saved in save_all(&url, troubled, 2, 1, 9) {
        saved.unwrap();
    }
    check_ranges(root(&url, server.in_turn).store.as_ref());
}
