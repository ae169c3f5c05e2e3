//! The thread of a save: it begins, waits for the data, makes it durable, contributes the part, and commits or waits.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_engine::write_all_at;
use forebay_error::{Code, Error, Result};
use forebay_format::crc::crc32;

use super::assemble::{Facts, assemble};
use super::part;
use super::write::{OpenFiles, Writer, internal, lock};
use super::{Commit, Job, Outcome, Request, SideFile};
use crate::commit::{Attempt, Gathered, data_file};
use crate::manifest::PartFile;

/// How often the thread shows that it lives while data is written; also how often it looks whether another rank failed.
const BEAT: Duration = Duration::from_millis(500);

/// What the thread keeps until nobody reads the memory any more.
pub(super) type Keep = Option<Box<dyn Any + Send>>;

/// How long the outcome of a save that failed waits for those who still read the memory or write the files: a whole
/// piece takes milliseconds, storage that hangs is waited for behind the caller's back.
const SETTLE: Duration = Duration::from_secs(1);

/// Runs a save to its end, and tells the outcome. What was kept goes when nobody reads the memory any more; where
/// nothing was, the memory is the caller's, who goes by the outcome: it waits as long as it takes.
pub(super) fn thread(job: &Job, request: &Request, writer: &Arc<Writer>, kept: &Mutex<Keep>) {
    let lent = lock(kept).is_none();
    let outcome = guarded(|| run(job, request, writer, kept));
    let failed = outcome.is_err();
    if failed {
        writer.give_up();
        job.staging.cancel();
    }
    let mut settled = !failed || job.staging.wait_settled(SETTLE);
    while lent && !settled {
        settled = job.staging.wait_settled(SETTLE);
    }
    let let_go = || {
        writer.close();
        release(kept);
    };
    if settled {
        let_go();
    }
    *lock(&job.outcome) = Some(outcome);
    job.ended.notify_all();
    if !settled {
        while !job.staging.wait_settled(SETTLE) {}
        let_go();
    }
}

/// Not under the lock: what is kept may take long to go.
fn release(kept: &Mutex<Keep>) {
    let memory = lock(kept).take();
    drop(memory);
}

fn run(job: &Job, request: &Request, writer: &Arc<Writer>, kept: &Mutex<Keep>) -> Result<Outcome> {
    match request.commit {
        Commit::Protocol => with_protocol(job, request, writer, kept),
        Commit::External => without(job, request, writer, kept),
    }
}

fn with_protocol(
    job: &Job,
    request: &Request,
    writer: &Arc<Writer>,
    kept: &Mutex<Keep>,
) -> Result<Outcome> {
    let (root, policy) = (&request.root, &request.policy);
    let mut attempt = Attempt::begin(root, policy, request.hints.clone(), request.spec.clone())?;
    match write(job, request, writer, kept, Some(&attempt)) {
        Ok(part) => {
            let published = attempt.publish_part(&part);
            if let Err(error) = published {
                return Err(attempt.fail(error));
            }
        }
        Err(error) => return Err(attempt.fail(error)),
    }
    let durable = job.started.elapsed();
    let facts = facts(request);
    let structure = request.plan.structure();
    let committed = attempt.wait_or_commit_unless(&job.cancelled, &mut |gathered: Gathered| {
        assemble(&facts, &structure, &gathered.parts, gathered.manifest_name)
    })?;
    Ok(Outcome {
        durable: committed.durable,
        durable_seconds: durable.as_secs_f64(),
        commit_seconds: (job.started.elapsed() - durable).as_secs_f64(),
        part: Vec::new(),
    })
}

fn without(
    job: &Job,
    request: &Request,
    writer: &Arc<Writer>,
    kept: &Mutex<Keep>,
) -> Result<Outcome> {
    if !request.root.store.sees_all() {
        let what = "a save that somebody else commits needs one place for all of its files";
        return Err(Error::new(Code::Unsupported, what).at(request.root.store.name()));
    }
    let part = write(job, request, writer, kept, None).inspect_err(|_| remove(request, writer))?;
    let durable_seconds = job.started.elapsed().as_secs_f64();
    Ok(Outcome { durable: true, durable_seconds, commit_seconds: 0.0, part })
}

/// Removes the files of a save that has failed. Nobody else knows their names.
fn remove(request: &Request, writer: &Writer) {
    let names = (0_u32..).zip(&writer.files.files);
    let keys: Vec<String> = names.map(|(number, _)| external(request, number).1).collect();
    if let Err(error) = request.root.store.discard(&keys) {
        tracing::debug!(%error, "left to the collector");
    }
}

/// Name and key of a file of a save that somebody else commits.
fn external(request: &Request, number: u32) -> (String, String) {
    let spec = &request.spec;
    let name = data_file(spec.attempt, spec.rank, number);
    let key = crate::commit::Layout::new(&spec.folder).file(&name);
    (name, key)
}

/// Everything up to the part: files, data, side files, all durable.
fn write(
    job: &Job,
    request: &Request,
    writer: &Arc<Writer>,
    kept: &Mutex<Keep>,
    attempt: Option<&Attempt>,
) -> Result<Vec<u8>> {
    let (names, side) = alive(attempt, || {
        let (names, open) = create(request, writer, attempt)?;
        writer.open(open)?;
        Ok((names, side_files(request, attempt)?))
    })?;
    wait(job, attempt, |time| job.staging.wait_staged(time))?;
    release(kept);
    wait(job, attempt, |time| job.staging.wait_done(time))?;
    alive(attempt, || writer.seal())?;
    let named = names.into_iter().zip(0..).map(|((name, bytes), number)| {
        let crc = writer.file_crc(number);
        PartFile { name, bytes, crc }
    });
    let files = named.chain(side).collect();
    let (spec, placed) = (&request.spec, &writer.files.items);
    let who = (spec.attempt, spec.rank, spec.world);
    part::encode(&request.plan, placed, |number| writer.crcs(number), who, files)
}

fn create(
    request: &Request,
    writer: &Writer,
    attempt: Option<&Attempt>,
) -> Result<(Vec<(String, u64)>, OpenFiles)> {
    let (mut names, mut open) = (Vec::new(), Vec::new());
    for (number, file) in (0_u32..).zip(&writer.files.files) {
        let (name, object) = match attempt {
            Some(attempt) => attempt.data_file(number, file.len)?,
            None => {
                let (name, key) = external(request, number);
                (name, request.root.store.create_data(&key, file.len)?)
            }
        };
        names.push((name, file.len));
        open.push(object);
    }
    Ok((names, open))
}

fn side_files(request: &Request, attempt: Option<&Attempt>) -> Result<Vec<PartFile>> {
    let mut files = Vec::new();
    for SideFile { name, bytes } in &request.side_files {
        let Some(attempt) = attempt else {
            return Err(Error::new(Code::Unsupported, "side files need a commit of ours").at(name));
        };
        let (stored, object) = attempt.side_file(name, bytes.len() as u64)?;
        write_all_at(object.sink(), bytes, 0)?;
        object.seal()?;
        let crc = Some(crc32(bytes));
        files.push(PartFile { name: stored, bytes: bytes.len() as u64, crc });
    }
    Ok(files)
}

/// Waits for the data, alive, and not longer than the other ranks do.
fn wait(
    job: &Job,
    attempt: Option<&Attempt>,
    done: impl Fn(Duration) -> Result<bool>,
) -> Result<()> {
    let mut looked = Instant::now();
    loop {
        if done(BEAT)? {
            return Ok(());
        }
        if job.cancelled.load(Ordering::Relaxed) {
            return Err(Error::new(Code::Cancelled, "the save was cancelled"));
        }
        if let Some(attempt) = attempt
            && looked.elapsed() >= BEAT
        {
            attempt.beat();
            attempt.check()?;
            looked = Instant::now();
        }
    }
}

/// Does what may take longer than a lease on a slow disk, and shows all the while that this rank is alive.
fn alive<T: Send>(attempt: Option<&Attempt>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let (done, waiting) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let working = scope.spawn(move || {
            let result = work();
            drop(done);
            result
        });
        while let Err(RecvTimeoutError::Timeout) = waiting.recv_timeout(BEAT) {
            let () = attempt.map_or((), Attempt::beat);
        }
        working.join().unwrap_or_else(|_| Err(internal("a thread of a save panicked")))
    })
}

fn facts(request: &Request) -> Facts {
    Facts {
        attempt: request.spec.attempt,
        info: request.info.clone(),
        place: request.place(),
        paths: Default::default(),
    }
}

/// Turns a panic of the thread into an error.
fn guarded(work: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    caught.unwrap_or_else(|_| Err(internal("the thread of a save panicked")))
}
