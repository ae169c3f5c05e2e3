//! The state of the page cache before a load: enforced, then looked at. A benchmark that only hopes for its state
//! measures something else.

use forebay_engine::LocalFile;
use forebay_error::{Code, Error, Result};
use forebay_format::{Handle, Model, OpenFile};
use forebay_topology::residency::{self, Method};
use rustix::fs::Advice;
use serde::Serialize;

use crate::args::CacheState;
use crate::parallel;

/// Resident at most this, and a file counts as cold: readahead of headers and of neighbours leaves some pages.
const COLD_SHARE_MAX: f64 = 0.01;

/// Resident at least this, and a file counts as warm.
const WARM_SHARE_MIN: f64 = 0.99;

/// Dropping takes what is clean and unused; a page in use at that moment stays and goes at the next try.
const TRIES: usize = 4;

/// The state that loads met.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Found {
    pub(crate) state: &'static str,
    /// Resident share of the model's pages, of all loads the one furthest from the state asked for.
    pub(crate) resident_share: f64,
    /// How it was found out.
    pub(crate) method: &'static str,
    /// Whether the kernel could be asked at all.
    pub(crate) verified: bool,
}

impl Found {
    /// The one that is further from `state`.
    pub(crate) fn worse(self, other: Self, state: CacheState) -> Self {
        let other_is_worse = match state {
            CacheState::Cold => other.resident_share > self.resident_share,
            CacheState::Warm => other.resident_share < self.resident_share,
        };
        if other_is_worse || !other.verified { other } else { self }
    }
}

/// Fails where the state cannot be had; gives the file system's name.
pub(crate) fn check_possible(model: &Model, state: CacheState) -> Result<String> {
    let Some(open) = model.files.first() else { return Ok(String::new()) };
    let file = LocalFile::new(open.clone())?;
    let kind = file.profile().kind.to_string();
    if state == CacheState::Cold && matches!(kind.as_str(), "tmpfs" | "ramfs") {
        let error = Error::new(
            Code::Unsupported,
            format!("{kind} keeps its files in memory, they are never cold"),
        );
        return Err(error.at(open.path.display()).hint("say `--dir` with a folder on a disk"));
    }
    Ok(kind)
}

/// Brings all files into the state and says what was found.
pub(crate) fn enforce(model: &Model, state: CacheState) -> Result<Found> {
    let mut found = look(model, state)?;
    for _ in 0..TRIES {
        if found.verified && is_reached(found, state) {
            return Ok(found);
        }
        match state {
            CacheState::Cold => drop_pages(model)?,
            CacheState::Warm => read_all(model)?,
        }
        found = look(model, state)?;
        if !found.verified {
            return Ok(found);
        }
    }
    if is_reached(found, state) {
        return Ok(found);
    }
    let what = format!(
        "the page cache holds {:.1} % of the model ({}), it should be {}",
        found.resident_share * 100.0,
        found.method,
        found.state
    );
    Err(match state {
        CacheState::Cold => Error::new(Code::Io, what)
            .hint("another process uses the files, or the file system keeps their pages"),
        CacheState::Warm => Error::new(Code::OutOfMemory, what)
            .hint("the model is larger than the memory that is free: take a smaller one"),
    })
}

fn is_reached(found: Found, state: CacheState) -> bool {
    match state {
        CacheState::Cold => found.resident_share <= COLD_SHARE_MAX,
        CacheState::Warm => found.resident_share >= WARM_SHARE_MIN,
    }
}

fn look(model: &Model, state: CacheState) -> Result<Found> {
    let (mut pages, mut resident) = (0, 0);
    let mut method = Method::Cachestat;
    for open in &model.files {
        let found = residency::probe(&local(open)?.file, 0, open.size())?;
        pages += found.pages;
        resident += found.resident_pages;
        if found.method != Method::Cachestat {
            method = found.method;
        }
    }
    let resident_share = if pages == 0 { 1.0 } else { resident as f64 / pages as f64 };
    let state = match state {
        CacheState::Cold => "cold",
        CacheState::Warm => "warm",
    };
    let verified = method != Method::Unknown;
    Ok(Found { state, resident_share, method: method.as_str(), verified })
}

/// Writes dirty pages out, which could not be dropped, and drops all.
fn drop_pages(model: &Model) -> Result<()> {
    for open in &model.files {
        let failed =
            |what: &str, error: std::io::Error| Error::io(what, error).at(open.path.display());
        local(open)?
            .file
            .sync_all()
            .map_err(|error| failed("cannot force the file to the disk", error))?;
        rustix::fs::fadvise(&local(open)?.file, 0, None, Advice::DontNeed)
            .map_err(|errno| failed("cannot drop the file from the page cache", errno.into()))?;
    }
    Ok(())
}

/// Reads all files once.
fn read_all(model: &Model) -> Result<()> {
    parallel::map(
        &model.files,
        forebay_topology::worker_cpus(),
        |_, open: &std::sync::Arc<OpenFile>| {
            let mut buffer = vec![0_u8; 4 << 20];
            let mut done = 0;
            while done < open.size() {
                crate::interrupt::check()?;
                let len = (open.size() - done).min(buffer.len() as u64);
                let Some(part) = buffer.get_mut(..len as usize) else { break };
                open.read_exact_at(part, done)?;
                done += len;
            }
            Ok(())
        },
    )
    .map(drop)
}

/// The file behind: there is no cache to ask about in a bucket.
fn local(open: &OpenFile) -> Result<&Handle> {
    let what = "the page cache is that of local files";
    let handle = open.local().map(AsRef::as_ref);
    handle.ok_or_else(|| Error::new(Code::Usage, what).at(open.path.display()))
}
