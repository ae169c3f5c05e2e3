//! Stdout and stderr. Results go to stdout through [`Console::print`] and [`Console::json`]; everything else goes to
//! stderr. Text out of files (tensor names, metadata, paths) passes [`clean`] on its way to either, so that a model
//! cannot write to the terminal.

use std::borrow::Cow;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_error::{Code, Error, Result};
pub(crate) use forebay_format::harmless as clean;
use forebay_format::is_unseen;
use serde::Serialize;
use tracing_subscriber::EnvFilter;

use crate::args::Global;

/// The variable that says what to log.
const LOG_VARIABLE: &str = "FOREBAY_LOG";

/// Where output goes and how.
pub(crate) struct Console {
    json: bool,
    quiet: bool,
    color: bool,
    closed: AtomicBool,
}

impl Console {
    pub(crate) fn new(global: &Global) -> Self {
        Self {
            json: global.json,
            quiet: global.quiet,
            color: wants_color(),
            closed: AtomicBool::new(false),
        }
    }

    /// Whether the result is to be JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Whether to show progress: on a terminal, for people.
    pub(crate) fn shows_progress(&self) -> bool {
        !self.json && !self.quiet && io::stderr().is_terminal()
    }

    /// Writes text to stdout, unless quiet.
    pub(crate) fn print(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        if self.quiet {
            return Ok(());
        }
        let mut out = BufWriter::new(io::stdout().lock());
        self.written(write(&mut out).and_then(|()| out.flush()))
    }

    /// Writes one line of JSON to stdout.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(value)
            .map_err(|error| Error::new(Code::Internal, "cannot write JSON").with_source(error))?;
        let mut out = io::stdout().lock();
        let text = escape_for_json(&text);
        self.written(out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")))
    }

    /// Whether a write failed because nobody reads stdout any more.
    pub(crate) fn stdout_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn written(&self, result: io::Result<()>) -> Result<()> {
        result.map_err(|error| {
            if error.kind() == io::ErrorKind::BrokenPipe {
                self.closed.store(true, Ordering::Relaxed);
            }
            Error::io("cannot write to stdout", error)
        })
    }

    /// `error[code]: ...` with causes and hints.
    pub(crate) fn error(&self, error: &Error) {
        for (index, line) in error.render().lines().enumerate() {
            match line.split_once(": ") {
                Some((head, rest)) if index == 0 => self.say("1;31", &format!("{head}:"), rest),
                Some(("hint", rest)) => self.say("1;36", "hint:", rest),
                _ => self.say("", "", line),
            }
        }
    }

    /// `warning: ...`
    pub(crate) fn warning(&self, text: &str) {
        self.say("1;33", "warning:", text);
    }

    /// A line of news for people; none when quiet or for a program.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet && !self.json {
            self.say("", "", text);
        }
    }

    fn say(&self, style: &str, head: &str, text: &str) {
        let text = clean(text);
        let space = if head.is_empty() { "" } else { " " };
        let line = match self.color && !style.is_empty() {
            true => format!("\x1b[{style}m{head}\x1b[0m{space}{text}\n"),
            false => format!("{head}{space}{text}\n"),
        };
        // With stderr gone there is nobody to tell.
        let _ = io::stderr().write_all(line.as_bytes());
    }
}

/// Sets up the log: what `FOREBAY_LOG` says, else warnings, and with `--verbose` more.
pub(crate) fn start_log(verbose: u8) -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(log_filter(verbose, "warn")?)
        .with_writer(io::stderr)
        .with_ansi(wants_color())
        .compact()
        .init();
    Ok(())
}

/// What is logged: what `FOREBAY_LOG` says, else `default`, and with `--verbose` more.
pub(crate) fn log_filter(verbose: u8, default: &str) -> Result<EnvFilter> {
    let text = std::env::var(LOG_VARIABLE).ok().filter(|text| !text.trim().is_empty());
    let text = text.unwrap_or_else(|| {
        match verbose {
            0 => default,
            1 => "warn,forebay=debug",
            _ => "trace",
        }
        .to_owned()
    });
    EnvFilter::try_new(&text).map_err(|error| {
        Error::new(Code::Usage, format!("{LOG_VARIABLE} is not understood: {text}"))
            .with_source(error)
            .hint("say for example FOREBAY_LOG=forebay_engine=debug")
    })
}

/// Whether stderr shows colours.
pub(crate) fn wants_color() -> bool {
    io::stderr().is_terminal() && colors_are_welcome()
}

/// Whether stdout does.
pub(crate) fn color_on_stdout() -> bool {
    io::stdout().is_terminal() && colors_are_welcome()
}

fn colors_are_welcome() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    !is_set("NO_COLOR") && !dumb
}

/// JSON that can be shown: `serde_json` escapes the controls below 32, terminals obey those at 127 to 159 as well.
/// Outside of strings JSON has none of them, and inside of strings both spellings mean the same.
fn escape_for_json(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unseen) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        if is_unseen(c) {
            // All of them fit 16 bits.
            shown.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Prints what clap has found, an error with the code that all errors have. Nobody left to read it is no fault.
pub(crate) fn usage_error(error: &clap::Error) {
    if !error.use_stderr() {
        let _ = error.print();
        return;
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let _ = write!(std::io::stderr(), "error[usage]: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_escaped() {
        assert_eq!(clean("model.w é"), "model.w é");
        assert_eq!(clean("a\u{1b}[31m\n"), "a\\u{1b}[31m\\n");
        assert_eq!(clean("a\u{9b}\u{202e}b"), "a\\u{9b}\\u{202e}b");
        let json = serde_json::to_string("a\u{1b}\u{9b}\u{7f}b").unwrap();
        let shown = escape_for_json(&json);
        assert_eq!(shown, r#""a\u001b\u009b\u007fb""#);
        assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), "a\u{1b}\u{9b}\u{7f}b");
    }
}
