//! Starting saves. **unsafe**: memory is given by address.

use std::any::Any;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forebay_checkpoint::commit::{
    self, AttemptId, Policy, Root, RunId, Spec, StructureHash, SystemClock,
};
use forebay_checkpoint::manifest::Info;
use forebay_checkpoint::model::PathStep;
use forebay_checkpoint::save::{
    self, Commit, Facts, Object, OurMetadata, Request, SavePlan, SideFile, Source, What, assemble,
};
use forebay_engine::stage::Place;
use forebay_error::Error;
use forebay_store::{PosixStore, Store};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sha2::{Digest, Sha256};

use super::audit::Audited;
use super::bequeath::Bequeath;
use super::hints::Hints;
use super::pool::Pool;
use super::saving::Save;
use super::structure::{Step, Structure};
use super::tiers::Tiers;
use super::usage;
use crate::engine::Engine;
use crate::error::Result;
use crate::fork::Own;
use crate::place::{Home, home};
use crate::process::Holder;
use crate::wait::interruptible;

/// Room set aside for a part: a header, and so much for each item that is written.
const PART_BYTES: u64 = 16 << 10;
const PART_BYTES_ITEM: u64 = 64;

/// Threads that write, by default: a drive is full with these.
const WRITERS_MAX: usize = 8;
/// The same for folders that lie in memory.
const WRITERS_IN_MEMORY_MAX: usize = 16;

/// A folder or prefix of steps (or one step) as a store of the commit protocol. A folder is made where it is not there.
pub(super) fn root(place: &std::path::Path, make: bool) -> forebay_error::Result<Root> {
    let store: Arc<dyn Store> = match home(place)? {
        Home::Bucket(store) => store,
        Home::Folder(folder) => {
            let store =
                if make { PosixStore::create(&folder)? } else { PosixStore::open(&folder)? };
            Arc::new(Audited::new(store, &folder))
        }
    };
    Ok(Root { store, clock: Arc::new(SystemClock::default()), identify: Arc::new(OurMetadata) })
}

pub(super) fn run_id(text: &str) -> forebay_error::Result<RunId> {
    let id = u32::from_str_radix(text, 16).ok().filter(|_| text.len() == 8);
    id.map(RunId).ok_or_else(|| usage(format!("run id {text:?} is not 8 hexadecimal digits")))
}

/// An object of the state: a pickle, or with true an archive of `torch.save`.
#[derive(FromPyObject)]
enum ObjectArg<'py> {
    Pickle(Bound<'py, PyBytes>),
    Archive(Bound<'py, PyBytes>, bool),
}

impl ObjectArg<'_> {
    fn take(&self) -> Object {
        match self {
            ObjectArg::Pickle(bytes) | ObjectArg::Archive(bytes, false) => {
                Object::Pickle(bytes.as_bytes().to_vec())
            }
            ObjectArg::Archive(bytes, true) => Object::Archive(bytes.as_bytes().to_vec()),
        }
    }
}

/// What saves of one rank to one folder have in common.
struct Settings {
    root: Root,
    rank: u32,
    world: u32,
    run: RunId,
    engine: Arc<forebay_engine::Engine>,
    pool: Arc<forebay_device::Arena>,
    takers: Option<usize>,
    flat: bool,
    commit: Commit,
    policy: Policy,
    who: String,
    /// Whether the folder lies in memory.
    in_memory: bool,
}

impl Settings {
    /// Threads that write.
    fn writers(&self) -> usize {
        // Writes to memory cost CPU and no waiting, and a file takes one writer at a time.
        let most = if self.in_memory { WRITERS_IN_MEMORY_MAX } else { WRITERS_MAX };
        self.takers.unwrap_or_else(|| forebay_topology::worker_cpus().clamp(1, most))
    }

    fn spec(
        &self,
        step: u64,
        counter: u32,
        epoch: u64,
        parent: Option<u64>,
        agreed: &str,
        items: u64,
    ) -> Spec {
        Spec {
            folder: if self.flat { String::new() } else { commit::step_folder(step) },
            step,
            attempt: AttemptId { run: self.run, save: counter },
            rank: self.rank,
            world: self.world,
            structure: StructureHash(Sha256::digest(agreed).into()),
            epoch,
            parent,
            part_bytes: PART_BYTES + items * PART_BYTES_ITEM,
            who: self.who.clone(),
        }
    }
}

/// Where the tensor regions of a plan lie. Errors: `usage` for one that has elements and no memory, as wrappers of
/// tensors say of themselves; it is named.
fn sources(
    plan: &SavePlan,
    addresses: &[u64],
    places: &[u8],
) -> forebay_error::Result<Vec<Source>> {
    let regions = plan.items().iter().filter(|item| item.writes).filter_map(|item| {
        let What::Tensor { region, .. } = &item.what else { return None };
        Some((item, region))
    });
    for (&address, (item, region)) in addresses.iter().zip(regions) {
        if address == 0 && !region.is_empty() {
            return Err(usage("a tensor that has elements lies at address 0").at(&item.name));
        }
    }
    let source = |(&address, &place): (&u64, &u8)| {
        let place = if place == 1 { Place::Device } else { Place::Host };
        Source { place, address }
    };
    Ok(addresses.iter().zip(places).map(source).collect())
}

/// Saves of one rank to one folder.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Saver {
    _holder: Holder,
    inner: Own<Arc<Settings>>,
}

#[pymethods]
impl Saver {
    /// `root` holds folders `step-N`; with `flat` it is itself the step's folder. `run_id` is 8 hexadecimal digits,
    /// the same on all ranks. With `commit="external"` a save ends with its part, see `commit_parts`.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    #[pyo3(signature = (root, *, rank, world, run_id, engine, pool, takers=None, flat=false,
                        commit="protocol", overwrite=true, lease_s=None, deadline_s=None,
                        who=None))]
    fn new(
        py: Python<'_>,
        root: PathBuf,
        rank: u32,
        world: u32,
        run_id: &str,
        engine: &Engine,
        pool: &Pool,
        takers: Option<usize>,
        flat: bool,
        commit: &str,
        overwrite: bool,
        lease_s: Option<f64>,
        deadline_s: Option<f64>,
        who: Option<String>,
    ) -> Result<Self> {
        let commit = match commit {
            "protocol" => Commit::Protocol,
            "external" => Commit::External,
            _ => return Err(usage(format!("commit is {commit:?}")).into()),
        };
        let mut policy = Policy { overwrite, ..Policy::default() };
        let seconds = |value: Option<f64>, default: Duration| {
            value.and_then(|value| Duration::try_from_secs_f64(value).ok()).unwrap_or(default)
        };
        policy.lease = seconds(lease_s, policy.lease);
        policy.deadline = seconds(deadline_s, policy.deadline);
        let (run, engine, pool) = (self::run_id(run_id)?, engine.shared()?, pool.shared()?);
        let (root, in_memory) = interruptible(py, move |_| {
            let made = self::root(&root, true)?;
            let Home::Folder(folder) = home(&root)? else { return Ok((made, false)) };
            let open = std::fs::File::open(&folder)
                .map_err(|error| Error::io("cannot open the folder", error))?;
            let profile = forebay_topology::file_profile(&open, &folder)?;
            Ok((made, profile.kind == forebay_topology::FsKind::Tmpfs))
        })?;
        let who = who.unwrap_or_else(|| format!("process {}", std::process::id()));
        let settings = Settings {
            root,
            rank,
            world,
            run,
            engine,
            pool,
            takers,
            flat,
            commit,
            policy,
            who,
            in_memory,
        };
        Ok(Self { _holder: Holder::new(), inner: Own::new(Arc::new(settings), "this saver") })
    }

    /// Claims the next epoch of the folder for this run: once a life of the job, on one rank, before its first save.
    /// With tiers, it is a folder of a job that has more of them: what was claimed there counts here.
    #[pyo3(signature = (parent=None, tiers=None))]
    fn claim(&self, py: Python<'_>, parent: Option<u64>, tiers: Option<&Tiers>) -> Result<u64> {
        let settings = self.inner.get()?.clone();
        let others = tiers.map(Tiers::farther).transpose()?.unwrap_or_default();
        interruptible(py, move |_| {
            let (root, run) = (&settings.root, settings.run);
            commit::claim_among(root, others, run, parent, &settings.who)
        })
    }

    /// Starts a save.
    ///
    /// `addresses` has one address for each tensor region that is written, in the order of the structure, `places` a
    /// 1 for each that is on the device and a 0 for the host; `objects` likewise the objects. Memory must stay as it
    /// is until the save is staged (with `in_place`: done); `keep` is held until then. Ranks hear of one another by
    /// `hints`, where there are some. `bequeath` is `(offsets, bytes, callback)`: the tensors lie at these places of
    /// memory of so many bytes, and what else it takes to finish the save is given to the callback before it starts.
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python method")]
    #[pyo3(signature = (step, structure, addresses, places, objects, *, agreed, counter, epoch=0,
                        parent=None, stream=None, in_place=false, side_files=Vec::new(),
                        torch=None, python=None, host=None, hints=None, keep=None,
                        bequeath=None))]
    fn start(
        &self,
        py: Python<'_>,
        step: u64,
        structure: &Structure,
        addresses: Vec<u64>,
        places: Vec<u8>,
        objects: Vec<ObjectArg<'_>>,
        agreed: &str,
        counter: u32,
        epoch: u64,
        parent: Option<u64>,
        stream: Option<usize>,
        in_place: bool,
        side_files: Vec<(String, Vec<u8>)>,
        torch: Option<String>,
        python: Option<String>,
        host: Option<String>,
        hints: Option<&Hints>,
        keep: Option<Py<PyAny>>,
        bequeath: Option<Bequeath>,
    ) -> Result<Save> {
        let settings = self.inner.get()?.clone();
        if (structure.rank, structure.world) != (settings.rank, settings.world) {
            return Err(usage("the structure is that of another rank or world").into());
        }
        if addresses.len() != places.len() {
            return Err(usage("as many places as addresses are needed").into());
        }
        let items = (addresses.len() + objects.len()) as u64;
        let spec = settings.spec(step, counter, epoch, parent, agreed, items);
        let attempt = spec.attempt;
        let info = info(&spec, torch, python, host);
        let writers = settings.writers();
        let board = hints.map(Hints::board).transpose()?.cloned();
        let request = Request {
            plan: structure.plan.clone(),
            root: settings.root.clone(),
            policy: settings.policy.clone(),
            hints: board.map(|board| board as Arc<dyn commit::Hints>),
            spec,
            info,
            side_files: side_files
                .into_iter()
                .map(|(name, bytes)| SideFile { name, bytes })
                .collect(),
            files: structure.files.unwrap_or(writers),
            writers: Some(writers),
            stream,
            // To a disk, the pool's aligned memory is written directly, and the copy costs less than the page cache
            // does.
            in_place: in_place && settings.in_memory,
            commit: settings.commit,
        };
        let sources = sources(&structure.plan, &addresses, &places)?;
        let objects: Vec<Object> = objects.iter().map(ObjectArg::take).collect();
        if let Some(bequeath) = bequeath {
            bequeath.hand_over(py, &request, &objects)?;
        }
        let keep = keep.map(|keep| Box::new(Kept(Some(keep))) as Box<dyn Any + Send>);
        let started = py.detach(|| {
            // SAFETY: the package passes addresses of tensors that it keeps, by `keep`, until the save is staged or
            // done, and nobody writes to them before that.
            unsafe {
                let (engine, pool) = (&settings.engine, &settings.pool);
                save::Save::start(engine, pool, request, &sources, objects, keep)
            }
        });
        Ok(Save::new(started?, step, attempt.to_string()))
    }
}

/// A Python object that a thread lets go: with the GIL, as long as there is an interpreter.
struct Kept(Option<Py<PyAny>>);

impl Drop for Kept {
    fn drop(&mut self) {
        let kept = self.0.take();
        if Python::try_attach(|_| drop(kept)).is_none() {
            // The interpreter is gone, and the object with it.
        }
    }
}

fn info(spec: &Spec, torch: Option<String>, python: Option<String>, host: Option<String>) -> Info {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Info {
        attempt: spec.attempt.to_string(),
        run: spec.attempt.run.to_string(),
        epoch: spec.epoch,
        step: spec.step,
        parent_step: spec.parent,
        world_size: spec.world,
        forebay: env!("CARGO_PKG_VERSION").to_owned(),
        torch,
        python,
        host,
        created: now.ok().map(|now| format!("{} s after 1970-01-01 UTC", now.as_secs())),
        ..Info::default()
    }
}

/// Commits a step from the parts of all ranks, in their order: for savers with `commit="external"`, on one rank.
/// `paths` are the ways in the nested state, by flat name.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
#[pyo3(signature = (root, parts, *, run_id, counter, step=0, epoch=0, paths=HashMap::new(),
                    overwrite=true, torch=None, python=None, host=None))]
pub(crate) fn commit_parts(
    py: Python<'_>,
    root: PathBuf,
    parts: Vec<Vec<u8>>,
    run_id: &str,
    counter: u32,
    step: u64,
    epoch: u64,
    paths: HashMap<String, Vec<Step>>,
    overwrite: bool,
    torch: Option<String>,
    python: Option<String>,
    host: Option<String>,
) -> Result<bool> {
    let attempt = AttemptId { run: self::run_id(run_id)?, save: counter };
    let paths: HashMap<String, Vec<PathStep>> = paths
        .into_iter()
        .map(|(name, steps)| (name, steps.into_iter().map(PathStep::from).collect()))
        .collect();
    interruptible(py, move |_| {
        let root = self::root(&root, true)?;
        let spec = Spec {
            folder: String::new(),
            step,
            attempt,
            rank: 0,
            world: 1,
            structure: StructureHash([0; 32]),
            epoch,
            parent: None,
            part_bytes: 0,
            who: format!("process {}", std::process::id()),
        };
        let mut info = info(&spec, torch, python, host);
        info.world_size = parts.len() as u32;
        let facts = Facts { attempt, info, place: root.store.name(), paths };
        let policy = Policy { overwrite, ..Policy::default() };
        let mut attempt = commit::Attempt::begin(&root, &policy, None, spec)?;
        attempt.writes_for(parts.len() as u32);
        if let Err(error) = attempt.publish_part(&[]) {
            return Err(attempt.fail(error));
        }
        // The planner of torch says where each chunk goes, not how tensors are cut: parts name their regions.
        let structure = Arc::default();
        let committed = attempt.wait_or_commit(&mut |gathered| {
            assemble(&facts, &structure, &parts, gathered.manifest_name)
        })?;
        Ok::<_, Error>(committed.durable)
    })
}
