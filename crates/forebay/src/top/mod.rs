//! `forebay top`: what the agent does, live.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`frame`] | a status as lines of text, of a given width |
//! | [`mod@line`] | a line that is cut, cleaned and coloured |
//! | [`screen`] | the terminal: its size, keys, and as it was at the end |

mod frame;
mod line;
mod screen;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use forebay_agent::Client;
use forebay_error::{Code, Error, Result};
use forebay_tier::status::Status;

use crate::agent::Configured;
use crate::console::{Console, color_on_stdout};
use crate::interrupt;
use frame::Look;
use screen::{Key, Screen};

/// Columns where there is no terminal.
const WIDTH: usize = 100;

/// `forebay top`
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    configured: Configured,
    /// The agent's socket [default: agent.socket of the configuration]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Which of the agent's jobs
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Print it once, instead of live
    #[arg(long)]
    once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = seconds)]
    every: f64,
}

fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number from 0.1 to 3600".to_owned()),
    }
}

/// Shows it until somebody has seen enough.
pub(crate) fn run(args: &TopArgs, console: &Console) -> Result<()> {
    let socket = match &args.socket {
        Some(socket) => socket.clone(),
        None => args.configured.load()?.agent.socket,
    };
    let job = args.job.as_deref();
    if args.once || console.is_json() {
        let status = Client::connect(&socket)?.status(job)?;
        if console.is_json() {
            return console.json(&status);
        }
        let width = screen::size().map_or(WIDTH, |size| size.0);
        let look = Look { width, height: usize::MAX, color: color_on_stdout(), now: now() };
        return console.print(|out| out.write_all(frame::text(&status, None, &look).as_bytes()));
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(
            Error::new(Code::Usage, "a live view needs a terminal").hint("--once prints it")
        );
    }
    live(&socket, job, Duration::from_secs_f64(args.every))
}

fn live(socket: &std::path::Path, job: Option<&str>, every: Duration) -> Result<()> {
    // The first answer before the screen is taken: an error then is one like any other.
    let mut client = Some(Client::connect(socket)?);
    let mut status = match &mut client {
        Some(client) => client.status(job)?,
        None => Status::default(),
    };
    let mut trouble = None;
    let mut screen = Screen::take()?;
    loop {
        let size = screen::size().unwrap_or((WIDTH, 24));
        let look = Look { width: size.0, height: size.1, color: color_on_stdout(), now: now() };
        screen.draw(&frame::text(&status, trouble.as_ref(), &look), size.1)?;
        if interrupt::received().is_some() || screen.key(every)? == Key::Quit {
            return Ok(());
        }
        // One that was started again is found again.
        let answer = match client.take() {
            Some(client) => Ok(client),
            None => Client::connect(socket),
        };
        match answer.and_then(|mut client| Ok((client.status(job)?, client))) {
            Ok((fresh, connected)) => (status, client, trouble) = (fresh, Some(connected), None),
            Err(error) => trouble = Some(error),
        }
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64())
}
