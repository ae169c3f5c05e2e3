//! What the tests save, how they load it, and the invariants.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    Assembled, Attempt, AttemptId, Clock, Committed, FileRef, Gathered, GcOptions, Hints, Identify,
    Layout, Policy, Root, RunId, Spec, State, StructureHash, gc, steps,
};
use forebay_engine::{RangeSource, write_all_at};
use forebay_error::{Code, Error, Result};
use forebay_store::{MemoryStore, Store};

use crate::sim::{Actor, Sim};

pub(crate) const HOUR: Duration = Duration::from_secs(3600);
/// Bytes of a rank's data file: several writes of a kernel, few for a test.
const DATA_BYTES: usize = 3000;

/// The `.metadata` of these tests is text: the attempt, then a line for each file.
pub(crate) struct TextMetadata;

impl Identify for TextMetadata {
    fn attempt(&self, metadata: &dyn RangeSource) -> Result<Option<AttemptId>> {
        let text = read(metadata)?;
        match text.lines().next().and_then(|line| line.strip_prefix("attempt ")) {
            Some(id) => id.parse().map(Some),
            None if text.starts_with("stock") => Ok(None),
            None => Err(Error::new(Code::InvalidMetadata, "no metadata of these tests")),
        }
    }

    fn files(&self, metadata: &dyn RangeSource) -> Result<Vec<String>> {
        Ok(files(&read(metadata)?).into_iter().map(|(name, _)| name).collect())
    }
}

fn files(text: &str) -> Vec<(String, u64)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("file "));
    let file = |line: &str| line.split_once(' ').map(|(name, n)| (name.into(), n.parse().unwrap()));
    lines.filter_map(file).collect()
}

fn read(source: &dyn RangeSource) -> Result<String> {
    let mut bytes = vec![0; usize::try_from(source.len()).unwrap()];
    let mut done = 0;
    while done < bytes.len() {
        let result = source.read_at(&mut bytes[done..], done as u64);
        match result.map_err(|error| Error::io("cannot read", error))? {
            0 => return Err(Error::new(Code::Truncated, "short")),
            count => done += count,
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// What a rank's data file holds.
fn data(attempt: AttemptId, rank: u32) -> Vec<u8> {
    format!("<{attempt} {rank}>").into_bytes().into_iter().cycle().take(DATA_BYTES).collect()
}

/// Times that keep the virtual waits short.
pub(crate) fn policy() -> Policy {
    Policy {
        deadline: Duration::from_secs(120),
        lease: Duration::from_secs(12),
        takeover: Duration::from_secs(4),
        appear: Duration::from_secs(20),
        ..Policy::default()
    }
}

/// No wait of a save may take longer: the deadline, all takeovers and retries.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(200);

pub(crate) fn attempt(run: u32, save: u32) -> AttemptId {
    AttemptId { run: RunId(run), save }
}

pub(crate) fn root(store: Arc<dyn Store>, clock: &Arc<Sim>) -> Root {
    let clock: Arc<dyn Clock> = Arc::<Sim>::clone(clock);
    Root { store, clock, identify: Arc::new(TextMetadata) }
}

pub(crate) fn spec(step: u64, attempt: AttemptId, rank: u32, world: u32) -> Spec {
    Spec {
        folder: format!("step-{step}"),
        step,
        attempt,
        rank,
        world,
        structure: StructureHash([7; 32]),
        epoch: 0,
        parent: None,
        part_bytes: 256,
        who: format!("host:{rank}"),
    }
}

/// One rank's whole save.
pub(crate) fn save(root: &Root, hints: Option<Arc<dyn Hints>>, spec: Spec) -> Result<Committed> {
    save_with(root, hints, &policy(), spec)
}

pub(crate) fn save_with(
    root: &Root,
    hints: Option<Arc<dyn Hints>>,
    policy: &Policy,
    spec: Spec,
) -> Result<Committed> {
    let (id, rank) = (spec.attempt, spec.rank);
    let mut attempt = Attempt::begin(root, policy, hints, spec)?;
    if let Err(error) = write(&mut attempt, id, rank) {
        return Err(attempt.fail(error));
    }
    attempt.wait_or_commit(&mut |gathered| Ok(assemble(id, gathered)))
}

pub(crate) fn write(attempt: &mut Attempt, id: AttemptId, rank: u32) -> Result<()> {
    let bytes = data(id, rank);
    let (name, file) = attempt.data_file(0, bytes.len() as u64)?;
    let (first, second) = bytes.split_at(bytes.len() / 2);
    write_all_at(file.sink(), second, first.len() as u64)?;
    attempt.beat();
    write_all_at(file.sink(), first, 0)?;
    file.seal()?;
    attempt.check()?;
    attempt.publish_part(format!("file {name} {}\n", bytes.len()).as_bytes())
}

pub(crate) fn assemble(id: AttemptId, gathered: Gathered) -> Assembled {
    let lines: String =
        gathered.parts.iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect();
    let manifest = format!("manifest of {id}\n{lines}").into_bytes();
    let refs = files(&lines).into_iter().map(|(name, bytes)| FileRef { name, bytes }).collect();
    let own = format!("file {} {}\n", gathered.manifest_name, manifest.len());
    Assembled {
        metadata: format!("attempt {id}\n{lines}{own}").into_bytes(),
        manifest,
        files: refs,
    }
}

/// A store, its clock, and a client of it.
pub(crate) struct Job {
    pub(crate) store: MemoryStore,
    pub(crate) sim: Arc<Sim>,
    pub(crate) root: Root,
}

impl Job {
    pub(crate) fn new() -> Self {
        let store = MemoryStore::new();
        let sim = Sim::new(&store);
        let root = root(Arc::new(store.clone()), &sim);
        Self { store, sim, root }
    }

    pub(crate) fn save_step(&self, step: u64, id: AttemptId, world: u32) {
        let roots = vec![self.root.clone(); world as usize];
        let (results, _) = save_all(&self.sim, &roots, |rank| spec(step, id, rank, world));
        assert!(results.iter().all(Result::is_ok), "{results:?}");
    }
}

/// All ranks of a save, one store each. Returns what each got, and how long it took.
pub(crate) fn save_all(
    sim: &Sim,
    roots: &[Root],
    spec: impl Fn(u32) -> Spec + Sync,
) -> (Vec<Result<Committed>>, Duration) {
    let spec = &spec;
    let actor = |(rank, root): (usize, &Root)| -> Actor<'static, Result<Committed>> {
        let (root, spec) = (root.clone(), spec(rank as u32));
        Box::new(move || save(&root, None, spec))
    };
    sim.run(roots.iter().enumerate().map(actor).collect())
}

/// Loads what a step's `.metadata` names, every byte: the attempt, or `None` where nothing is committed. Panics where
/// what is committed is not whole.
pub(crate) fn load(store: &dyn Store, step: u64) -> Option<AttemptId> {
    let layout = Layout::of_step(step);
    let (text, _) = store.get(&layout.metadata(), 1 << 20).unwrap()?;
    let text = String::from_utf8(text).unwrap();
    let id: AttemptId =
        text.lines().next().unwrap().strip_prefix("attempt ").unwrap().parse().unwrap();
    let files = files(&text);
    assert!(files.len() >= 2, "a data file and a manifest at least: {text}");
    for (rank, (name, bytes)) in files.iter().enumerate() {
        let found = store.get(&layout.file(name), 1 << 20).unwrap();
        let (found, _) = found.unwrap_or_else(|| panic!("step {step} of {id} lacks {name}"));
        assert_eq!(found.len() as u64, *bytes, "{name}");
        if name.ends_with(".distcp") {
            assert_eq!(found, data(id, rank as u32), "{name} of step {step}");
        }
    }
    Some(id)
}

/// What a listing says of a step agrees with what loads.
pub(crate) fn check_listing(root: &Root, store: &dyn Store) {
    for state in steps(root, Duration::from_secs(30)).unwrap() {
        let loaded = load(store, state.step);
        assert_eq!(state.state() == State::Committed, loaded.is_some(), "{state:?}");
        let listed = state.commit.as_ref().map(|commit| commit.attempt);
        assert_eq!(listed, loaded.map(Some), "{state:?}");
        if let Some(commit) = &state.commit {
            assert_eq!(commit.damage, None);
            assert!(commit.world > 0 && !commit.files.is_empty(), "no record: {commit:?}");
            assert!(commit.bytes > DATA_BYTES as u64 * u64::from(commit.world), "{commit:?}");
        }
    }
}

/// Collects, a day later, and checks that nothing is left but what the commits need.
pub(crate) fn collect_all(root: &Root, store: &dyn Store, sim: &Sim) {
    sim.advance(HOUR * 24);
    let report = gc(root, &GcOptions::default()).unwrap();
    assert!(report.failed.is_empty() && report.kept.is_empty(), "{report:?}");
    check_clean(store);
}

/// Nothing is there but commits, their files and the records that explain them.
pub(crate) fn check_clean(store: &dyn Store) {
    let all: BTreeSet<String> =
        store.list("", 1 << 20).unwrap().into_iter().map(|object| object.key).collect();
    for key in &all {
        let Some((folder, rest)) = key.split_once('/').filter(|(f, _)| f.starts_with("step-"))
        else {
            assert!(key.starts_with(".forebay/epoch/"), "{key}");
            continue;
        };
        let step = folder.strip_prefix("step-").unwrap().parse().unwrap();
        let id = load(store, step).unwrap_or_else(|| panic!("{key} is of no commit")).to_string();
        let records = [format!(".forebay/{id}/decision"), format!(".forebay/{id}/outcome")];
        let file = rest.starts_with(&id) || rest.starts_with(&format!("forebay.manifest-{id}_"));
        assert!(rest == ".metadata" || file || records.iter().any(|name| name == rest), "{key}");
    }
}

/// The code of a result; `None` where it is committed.
pub(crate) fn code<T>(result: &Result<T>) -> Option<Code> {
    result.as_ref().err().map(Error::code)
}
