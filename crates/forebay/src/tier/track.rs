//! `forebay tier track` and `untrack`: a folder is handed to the agent of this machine, or taken back.
//!
//! JSON: `{"job", "places": [place]}`, the folder first, then where its steps go; of `untrack` `{"job"}`.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use forebay_agent::Client;
use forebay_error::{Code, Error, Result};
use forebay_format::shown;
use serde::{Deserialize, Serialize};

use super::args::{SocketArgs, TrackArgs, UntrackArgs};
use crate::ckpt::Outcome;
use crate::console::{Console, clean};

/// For the agent to end what is under way: parts that hang in a call of a store take longest.
const END_TIME: Duration = Duration::from_secs(120);

/// What the agent says.
#[derive(Deserialize)]
struct Told {
    /// Its name for it: that of the configured job, where the folder is its own.
    job: String,
    places: Vec<String>,
}

#[derive(Serialize)]
struct Report<'a> {
    job: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    places: &'a [String],
}

/// Hands a folder over. Where the agent has it already, that is no error.
pub(super) fn track(args: &TrackArgs, console: &Console) -> Result<Outcome> {
    let folder = open(&args.folder)?;
    let job = match &args.name {
        Some(name) => name.clone(),
        None => name_of(&args.folder)?,
    };
    let told = connect(&args.agent)?.track(&job, folder.as_fd())?;
    let told: Told = serde_json::from_value(told).map_err(|error| {
        Error::new(Code::Unsupported, "the agent's answer is not understood").with_source(error)
    })?;
    let written = match console.is_json() {
        true => console.json(&Report { job: &told.job, places: &told.places }),
        false => console.print(|out| print(out, &told.job, &told.places)),
    };
    Outcome::Good.told(written, console)
}

/// Takes it back.
pub(super) fn untrack(args: &UntrackArgs, console: &Console) -> Result<Outcome> {
    connect(&args.agent)?.with_patience(END_TIME).untrack(&args.name)?;
    let job = clean(&args.name);
    let written = match console.is_json() {
        true => console.json(&Report { job: &args.name, places: &[] }),
        false => console.print(|out| writeln!(out, "{job} is not moved any more")),
    };
    Outcome::Good.told(written, console)
}

/// The agent of this machine. Errors: none answers.
pub(super) fn connect(args: &SocketArgs) -> Result<Client> {
    let socket = match &args.socket {
        Some(socket) => socket.clone(),
        None => args.load()?.agent.socket,
    };
    Client::connect(&socket)
}

/// Opens a folder of steps. Errors: `usage` for a bucket, or a folder that is a step; I/O.
fn open(folder: &Path) -> Result<File> {
    if folder.to_string_lossy().contains("://") {
        let what = "a folder of this machine is handed over, not a bucket";
        return Err(Error::new(Code::Usage, what).at(shown(folder)));
    }
    if folder.join(".metadata").exists() {
        let what = "the folder is a checkpoint, not a folder of steps";
        return Err(Error::new(Code::Usage, what).at(shown(folder)).hint("name the one above it"));
    }
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_DIRECTORY);
    options
        .open(folder)
        .map_err(|error| Error::io("cannot open the folder", error).at(shown(folder)))
}

/// What a job is called where nothing is said: as its folder. Errors: it has no name.
fn name_of(folder: &Path) -> Result<String> {
    let path = std::fs::canonicalize(folder)
        .map_err(|error| Error::io("cannot find the folder", error).at(shown(folder)))?;
    let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    let none = || Error::new(Code::Usage, "the folder has no name that a job could have");
    name.ok_or_else(|| none().at(shown(folder)).hint("--name says one"))
}

fn print(out: &mut dyn Write, job: &str, places: &[String]) -> std::io::Result<()> {
    let mut places = places.iter();
    let folder = places.next().map_or("", |place| place.trim_start_matches("fd://"));
    writeln!(out, "{}: steps of {} go to", clean(job), clean(folder))?;
    for place in places {
        writeln!(out, "  {}", clean(place))?;
    }
    Ok(())
}
