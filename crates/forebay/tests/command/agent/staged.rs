//! Staged saves: their processes die, and the agent finishes them.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_agent::{Staged, StagedSave};
use forebay_checkpoint::commit::{self, AttemptId, RunId, step_state};
use forebay_checkpoint::save::Bequest;
use forebay_error::{Code, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use serde_json::json;

use super::{Agent, LONG, Site, verify};
use crate::ckpt_make::{Rank, State, rank_of, root_at, save, try_save};
use crate::util::{forebay, json_of, sha256, text};

/// What a process hands over.
struct Handed {
    folder: File,
    memory: File,
    bequest: File,
}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

fn sealed(bytes: &[u8], seals: SealFlags) -> File {
    let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    let mut file = File::from(fd);
    file.write_all(bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

impl Handed {
    /// A rank's save, copied into memory as a trainer does it.
    fn new(folder: &Path, step: u64, ranks: (u32, u32), number: u32, state: &State) -> Self {
        Self::of(folder, rank_of(&root_at(folder), step, ranks, number, state))
    }

    fn of(folder: &Path, Rank { request, objects, memory }: Rank) -> Self {
        let (mut bytes, mut offsets) = (Vec::new(), Vec::new());
        for tensor in &memory {
            offsets.push(bytes.len() as u64);
            bytes.extend_from_slice(tensor);
            // As views of a buffer are aligned.
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        let bequest = Bequest::encode(&request, &objects, &offsets, bytes.len() as u64).unwrap();
        Self {
            folder: File::open(folder).unwrap(),
            memory: sealed(&bytes, SEALS),
            bequest: sealed(&bequest, SEALS | SealFlags::WRITE),
        }
    }

    fn stage(&self, agent: &Agent) -> Result<Staged> {
        let (folder, memory) = (self.folder.as_fd(), self.memory.as_fd());
        agent.client().stage("run7", folder, memory, self.bequest.as_fd())
    }
}

/// Waits until something holds; what the agent's log says if it never does.
fn until(agent: &Agent, what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "never {what}: {}", agent.log());
        std::thread::sleep(Duration::from_millis(30));
    }
}

fn staged(agent: &Agent) -> Vec<StagedSave> {
    agent.client().staged(None).unwrap()
}

/// Whose commit a step is.
fn committed(folder: &Path, step: u64) -> Option<AttemptId> {
    let state = step_state(&root_at(folder), step, Duration::ZERO).unwrap()?;
    state.commit?.attempt
}

fn attempt(save: u32) -> AttemptId {
    AttemptId { run: RunId(0xabc), save }
}

/// All tensors of a step, read by the command, are those of the state.
fn compare(step: &Path, state: &State) {
    let shown = json_of(forebay().args(["inspect", text(step), "--json", "--digest"]));
    let mut seen = 0;
    for tensor in shown["tensors"].as_array().unwrap() {
        let name = tensor["name"].as_str().unwrap();
        assert_eq!(tensor["sha256"], json!(sha256(state.data(name))), "{name}");
        seen += 1;
    }
    assert!(seen >= state.tensors.len(), "{shown}");
}

#[test]
fn a_staged_save_is_finished_when_its_process_is_gone() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job, state) = (site.start(), site.path("job"), State::new(5));
    save(&job, 1, 1, 1, &State::new(4));
    let handed = Handed::new(&job, 2, (0, 1), 2, &state);
    let held = handed.stage(&agent).unwrap();
    let [kept] = staged(&agent).try_into().unwrap();
    assert_eq!((kept.step, kept.rank, kept.world, kept.finishing), (2, 0, 1, false));
    assert_eq!((kept.job.as_str(), kept.attempt), ("run7", attempt(2).to_string()));
    assert!(kept.bytes > 3_000_000, "{}", kept.bytes);
    // Nothing but the agent has the memory any more.
    drop((handed, held));
    until(&agent, "committed", || committed(&job, 2).is_some());
    assert_eq!(committed(&job, 2), attempt(2).successor());
    verify(&job, 2);
    compare(&job.join("step-2"), &state);
    let side = std::fs::read(job.join("step-2/00000abc-80000002_0_notes.txt")).unwrap();
    assert_eq!(side, b"written with the step");
    until(&agent, "forgotten", || staged(&agent).is_empty());
    let latest = commit::latest(&root_at(&job)).unwrap().unwrap();
    assert_eq!(latest.step, 2);
    // The next save of the same run is newer.
    save(&job, 3, 1, 3, &state);
    assert_eq!(commit::latest(&root_at(&job)).unwrap().unwrap().step, 3);
}

#[test]
fn a_save_that_ended_leaves_nothing_to_do() {
    let site = Site::new("", "listen = \"127.0.0.1:0\"");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job, state) = (site.start(), site.path("job"), State::new(5));
    let handed = Handed::new(&job, 1, (0, 1), 1, &state);
    let held = handed.stage(&agent).unwrap();
    let (_, shown) = agent.get("/metrics");
    assert!(shown.contains("\nforebay_agent_staged_saves 1\n"), "{shown}");
    let jobs = forebay().args(["tier", "jobs", "--config", text(&site.config)]).output().unwrap();
    let jobs = crate::util::stdout(&jobs);
    assert!(jobs.contains("run7") && jobs.contains("rank 0 of 1"), "{jobs}");
    // Longer than a client keeps a connection that it does not use.
    std::thread::sleep(Duration::from_secs(3));
    held.let_go().unwrap();
    assert!(staged(&agent).is_empty());
    // Committed, and the process dies before it can say so.
    let held = handed.stage(&agent).unwrap();
    save(&job, 1, 1, 1, &state);
    drop(held);
    until(&agent, "forgotten", || staged(&agent).is_empty());
    assert_eq!(committed(&job, 1), Some(attempt(1)), "the one that was there");
    let (_, shown) = agent.get("/metrics");
    assert!(
        shown.contains("\nforebay_agent_staged_finished_total{result=\"not_needed\"} 1\n"),
        "{shown}"
    );
    assert!(shown.contains("\nforebay_agent_staged_saves 0\n"), "{shown}");
}

#[test]
fn saves_that_are_kept_take_no_places_of_the_socket() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job) = (site.start(), site.path("job"));
    let handed = Handed::new(&job, 1, (0, 1), 1, &State::new(1));
    let mut held: Vec<_> = (0..32).map(|_| handed.stage(&agent).unwrap()).collect();
    let refused = handed.stage(&agent).err().unwrap();
    assert!(refused.what().contains("32 staged saves"), "{refused}");
    // Of 64 places: before the idle are left, which takes some seconds.
    let start = Instant::now();
    let mut others: Vec<_> = (0..60).map(|_| agent.client()).collect();
    for client in &mut others {
        client.jobs().unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    // Room for another save, and on the same number of connections.
    held.pop().unwrap().let_go().unwrap();
    held.push(handed.stage(&agent).unwrap());
    for held in held {
        held.let_go().unwrap();
    }
    assert!(staged(&agent).is_empty());
}

#[test]
fn the_agents_of_a_job_finish_what_all_its_ranks_have_staged() {
    let (site, other) = (Site::new("", ""), Site::new("", ""));
    std::fs::create_dir(site.path("job")).unwrap();
    let (job, state) = (site.path("job"), State::new(9).with_rows(300));
    let agents = [site.start(), other.start()];
    let held = |rank: u32| {
        let handed = Handed::new(&job, 4, (rank, 3), 1, &state);
        handed.stage(&agents[rank as usize % 2]).unwrap()
    };
    let all = [0, 1, 2].map(held);
    let folder = File::open(&job).unwrap();
    let elsewhere = File::open(site.path("local")).unwrap();
    let of = |folder: &File| agents[0].client().staged(Some(folder.as_fd())).unwrap();
    assert_eq!((of(&folder).len(), of(&elsewhere).len()), (2, 0));
    let [first, second, third] = all;
    drop(first);
    until(&agents[0], "begun", || of(&folder).iter().any(|one| one.begun == 1));
    drop((second, third));
    until(&agents[0], "committed", || committed(&job, 4).is_some());
    assert_eq!(committed(&job, 4), attempt(1).successor());
    verify(&job, 4);
    compare(&job.join("step-4"), &state);
}

#[test]
fn a_rank_that_was_never_staged_leaves_the_older_step_and_a_newer_epoch_ends_it() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job, state) = (site.start(), site.path("job"), State::new(9));
    save(&job, 1, 2, 1, &State::new(1));
    drop(Handed::new(&job, 2, (1, 2), 2, &state).stage(&agent).unwrap());
    until(&agent, "begun", || staged(&agent).iter().any(|one| one.finishing && one.begun == 1));
    assert_eq!(commit::latest(&root_at(&job)).unwrap().unwrap().step, 1);
    commit::claim(&root_at(&job), RunId(0xdef), Some(1), "the job, again").unwrap();
    until(&agent, "given up", || staged(&agent).is_empty());
    assert!(agent.log().contains("is not committed"), "{}", agent.log());
    assert_eq!((committed(&job, 1), committed(&job, 2)), (Some(attempt(1)), None));
}

#[test]
fn ranks_that_live_may_commit_it_still() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job, state) = (site.start(), site.path("job"), State::new(9));
    drop(Handed::new(&job, 2, (1, 2), 2, &state).stage(&agent).unwrap());
    until(&agent, "begun", || staged(&agent).iter().any(|one| one.begun == 1));
    try_save(&job, 2, 2, 2, &state).unwrap();
    until(&agent, "forgotten", || staged(&agent).is_empty());
    assert_eq!(committed(&job, 2), Some(attempt(2)));
    assert!(agent.log().contains("is committed already"), "{}", agent.log());
    verify(&job, 2);
}

#[test]
fn a_newer_save_of_the_same_step_is_not_replaced() {
    let site = Site::new("", "");
    let (agent, state) = (site.start(), State::new(9));
    // What is staged may replace what is there.
    let stage = |job: &Path| {
        let mut rank = rank_of(&root_at(job), 2, (0, 1), 2, &state);
        rank.request.policy.overwrite = true;
        Handed::of(job, rank).stage(&agent).unwrap()
    };
    for (name, there, then) in [("new", 3, 3), ("old", 1, 0x8000_0002)] {
        let job = site.path(name);
        std::fs::create_dir(&job).unwrap();
        let held = stage(&job);
        save(&job, 2, 1, there, &State::new(1));
        drop(held);
        until(&agent, "forgotten", || staged(&agent).is_empty());
        assert_eq!(committed(&job, 2), Some(attempt(then)), "{name}: {}", agent.log());
    }
}

#[test]
fn what_could_harm_is_refused() {
    let site = Site::new("", "staged_limit = \"6 MB\"");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job, state) = (site.start(), site.path("job"), State::new(9));
    let good = || Handed::new(&job, 1, (0, 1), 1, &state);
    let refused = |handed: Handed| {
        let error = handed.stage(&agent).err().unwrap();
        (error.code(), error.what().to_owned())
    };
    let bytes = vec![7; 4 << 20];
    let unsealed = sealed(&bytes, SealFlags::GROW);
    let (code, what) = refused(Handed { memory: unsealed, ..good() });
    assert!(code == Code::Usage && what.contains("seals"), "{what}");
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(4 << 20).unwrap();
    let (code, what) = refused(Handed { memory: plain, ..good() });
    let told = what.contains("seals") || what.contains("memfd");
    assert!(code == Code::Usage && told, "{what}");
    let hole = memfd_create("hole", MemfdFlags::ALLOW_SEALING).unwrap();
    let hole = File::from(hole);
    hole.set_len(4 << 20).unwrap();
    fcntl_add_seals(&hole, SEALS).unwrap();
    let (code, what) = refused(Handed { memory: hole, ..good() });
    assert!(code == Code::Usage && what.contains("not all of the memory"), "{what}");
    if let Ok(huge) = memfd_create("huge", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB) {
        let huge = File::from(huge);
        huge.set_len(4 << 20).unwrap();
        fcntl_add_seals(&huge, SEALS).unwrap();
        let (code, what) = refused(Handed { memory: huge, ..good() });
        assert!(code == Code::Usage && what.contains("huge pages"), "{what}");
    }
    // A bequest that could change, is none, or is for more memory than there is.
    let mut read = Vec::new();
    std::io::Read::read_to_end(&mut reopened(&good().bequest), &mut read).unwrap();
    let (code, what) = refused(Handed { bequest: sealed(&read, SEALS), ..good() });
    assert!(code == Code::Usage && what.contains("seals"), "{what}");
    let all = SEALS | SealFlags::WRITE;
    let (code, _) = refused(Handed { bequest: sealed(b"nothing", all), ..good() });
    assert_eq!(code, Code::InvalidMetadata);
    let (code, _) = refused(Handed { memory: sealed(&bytes[..1 << 20], SEALS), ..good() });
    assert_eq!(code, Code::Usage);
    let (code, _) = refused(Handed { folder: File::open(&site.config).unwrap(), ..good() });
    assert_eq!(code, Code::Usage);
    // The drive of a node.
    std::fs::create_dir_all(site.path("drive/.forebay")).unwrap();
    std::fs::write(site.path("drive/.forebay/place"), "").unwrap();
    let (code, what) =
        refused(Handed { folder: File::open(site.path("drive")).unwrap(), ..good() });
    assert!(code == Code::Unsupported && what.contains("drives"), "{what}");
    // Nobody can say whether it is one.
    std::fs::create_dir(site.path("turns")).unwrap();
    std::os::unix::fs::symlink(".forebay", site.path("turns/.forebay")).unwrap();
    let (code, what) =
        refused(Handed { folder: File::open(site.path("turns")).unwrap(), ..good() });
    assert!(code == Code::Io && what.contains("cannot look"), "{what}");
    // More than may be kept.
    let held = good().stage(&agent).unwrap();
    let (code, what) = refused(good());
    assert!(code == Code::Unsupported && what.contains("6000000 is the most"), "{what}");
    held.let_go().unwrap();
    good().stage(&agent).unwrap().let_go().unwrap();
    assert_eq!(committed(&job, 1), None);
}

/// From its beginning, whoever has read it.
fn reopened(file: &File) -> File {
    let fd = std::os::fd::AsRawFd::as_raw_fd(file);
    File::open(format!("/proc/self/fd/{fd}")).unwrap()
}

#[test]
fn a_folder_of_another_user_is_refused() {
    if !crate::util::is_root() {
        return crate::util::skip("only root can give a folder to another user");
    }
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job) = (site.start(), site.path("job"));
    let handed = Handed::new(&job, 1, (0, 1), 1, &State::new(1));
    std::os::unix::fs::chown(&job, Some(12345), None).unwrap();
    assert_eq!(handed.stage(&agent).err().unwrap().code(), Code::PermissionDenied);
}

#[test]
fn another_configuration_forgets_nothing() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (agent, job, state) = (site.start(), site.path("job"), State::new(5));
    let handed = Handed::new(&job, 1, (0, 1), 1, &state);
    let (dies, ends) = (handed.stage(&agent).unwrap(), handed.stage(&agent).unwrap());
    agent.signal("-HUP");
    until(&agent, "started again", || agent.log().matches("started").count() >= 2);
    assert_eq!(staged(&agent).len(), 2);
    ends.let_go().unwrap();
    assert_eq!(staged(&agent).len(), 1);
    drop(dies);
    until(&agent, "committed", || committed(&job, 1).is_some());
    compare(&job.join("step-1"), &state);
}

#[test]
fn an_agent_that_ends_gives_up_what_it_has_begun() {
    let site = Site::new("", "");
    std::fs::create_dir(site.path("job")).unwrap();
    let (mut agent, job, state) = (site.start(), site.path("job"), State::new(5));
    drop(Handed::new(&job, 1, (1, 2), 1, &state).stage(&agent).unwrap());
    until(&agent, "begun", || staged(&agent).iter().any(|one| one.begun == 1));
    agent.signal("-TERM");
    let start = Instant::now();
    while agent.child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < Duration::from_secs(10), "{}", agent.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(committed(&job, 1), None);
}
