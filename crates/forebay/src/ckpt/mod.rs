//! `forebay ckpt`: checkpoints in a folder, looked at, checked, written out and cleaned up.
//!
//! | module | command |
//! | --- | --- |
//! | [`args`] | the command line of all of them |
//! | [`home`], [`place`] | from a path or URL to a root, or to the folder of a step |
//! | [`list`] | `list` and `latest` |
//! | [`show`] | `show` |
//! | [`usage`] | `du` |
//! | [`verify`] | `verify` |
//! | [`export`] | `export` |
//! | [`diff`] | `diff` |
//! | [`remove`] | `prune` and `gc` |
//! | [`audit`] | `audit` |
//! | [`table`] | columns |
//! | [`watch`] | the progress of long ones: the bar, signals, the reader's lease |
//!
//! What is found wrong is no error of the command: `verify` and `diff` say it on stdout (faults also as error lines on
//! stderr), and [`Outcome::Bad`] makes the exit code 1.

mod args;
mod audit;
mod diff;
mod export;
mod home;
mod list;
mod place;
mod remove;
mod show;
pub(crate) mod table;
mod usage;
mod verify;
mod watch;

use std::time::Duration;

use forebay_error::Result;

pub(crate) use args::Ckpt;
pub(crate) use home::place as place_of;

use crate::console::Console;

/// How a command ended that has done what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing is wrong.
    Good,
    /// Damage, or a difference, was found and told; or something could not be removed.
    Bad,
}

impl Outcome {
    pub(crate) fn good_if(good: bool) -> Self {
        if good { Self::Good } else { Self::Bad }
    }

    /// After it was written to stdout: that nobody reads there any more (`| head`) makes nothing bad good.
    pub(crate) fn told(self, written: Result<()>, console: &Console) -> Result<Self> {
        match written {
            Err(_) if self == Self::Bad && console.stdout_closed() => Ok(self),
            written => written.map(|()| self),
        }
    }
}

/// Runs one of them.
pub(crate) fn run(command: &Ckpt, console: &Console) -> Result<Outcome> {
    match command {
        Ckpt::List(args) => list::list(args, console),
        Ckpt::Latest(args) => list::latest(args, console),
        Ckpt::Show(args) => show::run(args, console),
        Ckpt::Du(args) => usage::run(args, console),
        Ckpt::Verify(args) => verify::run(args, console),
        Ckpt::Export(args) => export::run(args, console),
        Ckpt::Diff(args) => diff::run(args, console),
        Ckpt::Prune(args) => remove::prune(args, console),
        Ckpt::Gc(args) => remove::gc(args, console),
        Ckpt::Audit(args) => audit::run(args, console),
    }
}

/// `3 s`, `5 min`, `2 h`, `4 d`: rounded down.
pub(crate) fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7200 => format!("{} min", seconds / 60),
        seconds @ ..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}
