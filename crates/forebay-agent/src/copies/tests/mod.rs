//! Agents of several nodes in one process: real drives and records in folders, real steps, real TLS.

mod doors;
mod ring;
#[path = "../../../../forebay-tier/tests/hop/world.rs"]
#[expect(dead_code, reason = "it is for many tests")]
mod world;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::SystemClock;
use forebay_store::{MemoryStore, NODE_OWN, PosixStore, SplitStore, Store};
use forebay_tier::config::{Beside, Config};
use forebay_tier::runner::{Action, Runner, Tiers};
use forebay_tier::status::Status;

use super::{Copies, CopySettings, PeerSettings};
use crate::agent::Agent;
use crate::job::Jobs;
use crate::metrics::Counts;
use crate::settings::Settings;
use crate::staged::{Saves, Times};
use crate::track::Trackers;
use crate::work::Work;

const LONG: Duration = Duration::from_secs(60);
const PEER_TOKEN: &str = "0123456789abcdef-peer";
const READ_TOKEN: &str = "0123456789abcdef-read";
const ACT_TOKEN: &str = "0123456789abcdef-act";

/// A job on the drives of nodes, with step 7.
struct Cluster {
    folder: tempfile::TempDir,
    whole: MemoryStore,
    far: MemoryStore,
}

/// One of its nodes.
struct Node {
    // In this order: no requests to what has stopped.
    agent: Agent,
    copies: Arc<Copies>,
    runner: Arc<Runner>,
    work: Arc<dyn Work>,
    drive: PathBuf,
    counts: Arc<Counts>,
    jobs: Arc<Jobs>,
}

impl Cluster {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let whole = world::source();
        let (records, drives) = world::split(&whole);
        let put = |from: &MemoryStore, to: &str| {
            let to = PosixStore::create(&folder.path().join(to)).unwrap();
            for (key, bytes) in world::objects(from, "") {
                to.put(&key, &bytes).unwrap();
            }
        };
        put(&records, "records");
        for (number, drive) in drives.iter().enumerate() {
            put(drive, &format!("drive{number}"));
        }
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let pair = rcgen::generate_simple_self_signed(names).unwrap();
        let private = |name: &str, text: &str| {
            let mut options = std::fs::OpenOptions::new();
            let file = options.create(true).write(true).mode(0o600).open(folder.path().join(name));
            std::io::Write::write_all(&mut file.unwrap(), text.as_bytes()).unwrap();
        };
        private("cert.pem", &pair.cert.pem());
        private("key.pem", &pair.signing_key.serialize_pem());
        for (name, text) in [("peer", PEER_TOKEN), ("read", READ_TOKEN), ("act", ACT_TOKEN)] {
            private(name, text);
        }
        Self { folder, whole, far: MemoryStore::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn settings(&self, copies: usize, tls: bool) -> Settings {
        let path = |name: &str| Some(self.path(name));
        Settings {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            token_file: path("read"),
            action_token_file: path("act"),
            tls_certificate: path("cert.pem").filter(|_| tls),
            tls_key: path("key.pem").filter(|_| tls),
            copies: CopySettings {
                copies,
                jump: 1,
                gone: Duration::from_secs(5),
                peer: Some(PeerSettings {
                    token_file: self.path("peer"),
                    url: None,
                    ca_file: path("cert.pem").filter(|_| tls),
                }),
            },
            ..Settings::default()
        }
    }

    /// Starts a node, whose far tier is paused. `near`: lines for its first tier.
    fn start(&self, number: usize, near: &str, settings: &Settings) -> Node {
        let drive = self.path(&format!("drive{number}"));
        let store = |path: &Path| Arc::new(PosixStore::create(path).unwrap()) as Arc<dyn Store>;
        let near_store = Arc::new(SplitStore::new(store(&self.path("records")), store(&drive)));
        let text = format!(
            "[[tier]]\nname = \"near\"\nplace = \"memory:\"\n{near}\n\
             [[tier]]\nname = \"far\"\nplace = \"memory:\"\n\
             [tiers]\ngrace = 0\nlook_every = \"50 ms\"\npart_bytes = \"64 KiB\"\n\
             audit_log = \"audit{number}.log\"\n"
        );
        let file = self.path("forebay.toml");
        let config = Config::from_text(&text, &file, &Beside::default()).unwrap();
        let stores: Vec<Arc<dyn Store>> = vec![near_store, Arc::new(self.far.clone())];
        let clock = Arc::new(SystemClock::default());
        let tiers = Tiers::with_stores(&config, stores, clock).unwrap();
        let runner = Arc::new(Runner::start(Arc::clone(&tiers)).unwrap());
        runner.act(&Action::Pause { tier: Some("far".to_owned()) }, "test").unwrap();
        let (jobs, counts) = (Arc::new(Jobs::default()), Arc::new(Counts::default()));
        let copies = Arc::new(Copies::new(settings.copies.clone()));
        let tracker = Arc::new(Trackers::new(tiers, Arc::clone(&jobs)));
        let (all, count) = (Arc::clone(&jobs), Arc::clone(&counts));
        let saves = Saves::new(0, Times::default(), Arc::clone(&count));
        let agent = Agent::start(settings, all, count, tracker, &copies, saves).unwrap();
        let work = copies.add("run7", &runner).unwrap();
        jobs.add("run7", Arc::clone(&work)).unwrap();
        Node { agent, copies, runner, work, drive, counts, jobs }
    }

    /// Says that somebody has a drive.
    fn announce(&self, drive: &str, url: &str) {
        let folder = self.path("records/.forebay/peers").join(drive);
        std::fs::create_dir_all(&folder).unwrap();
        let told = format!(
            "{{\"host\":\"other\",\"job\":\"run7\",\"url\":\"{url}\",\"gone_seconds\":3600}}"
        );
        std::fs::write(folder.join("told"), told).unwrap();
    }

    /// Gives a drive its name.
    fn name_drive(&self, number: usize, name: &str) {
        let own = self.path(&format!("drive{number}/.forebay/here"));
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(own.join("drive"), name).unwrap();
    }

    /// The data files that a drive had at the beginning.
    fn own(&self, rank: usize) -> BTreeMap<String, Vec<u8>> {
        let (_, drives) = world::split(&self.whole);
        world::objects(&drives[rank], "")
    }
}

impl Node {
    fn address(&self) -> SocketAddr {
        self.agent.http().unwrap()
    }

    /// The data files on its drive.
    fn data(&self) -> BTreeMap<String, Vec<u8>> {
        let mut all = world::objects(&PosixStore::open(&self.drive).unwrap(), "");
        all.retain(|key, _| !key.starts_with(NODE_OWN));
        all
    }

    /// What it says of its files.
    fn marks(&self) -> Vec<String> {
        let own = world::objects(&PosixStore::open(&self.drive).unwrap(), NODE_OWN);
        own.into_keys().filter(|key| !key.ends_with("/drive")).collect()
    }

    fn until(&self, what: &str, holds: impl Fn(&Status) -> bool) -> Status {
        let start = Instant::now();
        loop {
            let status = self.work.status();
            if holds(&status) {
                return status;
            }
            assert!(start.elapsed() < LONG, "never {what}: {status:#?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn stop(self) {
        drop(self.agent);
        self.copies.remove("run7");
        self.runner.stop();
    }
}
