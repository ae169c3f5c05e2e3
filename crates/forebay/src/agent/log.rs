//! The agent's log: to stderr, for people or as an object a line, and its spans to a collector.

use std::io;

use forebay_agent::trace::SpanLayer;
use forebay_error::Result;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

use crate::console;

/// Starts it.
pub(super) fn start(verbose: u8, json: bool, spans: Option<SpanLayer>) -> Result<()> {
    let filter = console::log_filter(verbose, "warn,forebay=info")?;
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match json {
        true => fmt::layer().json().flatten_event(true).with_writer(io::stderr).boxed(),
        false => {
            fmt::layer().compact().with_ansi(console::wants_color()).with_writer(io::stderr).boxed()
        }
    };
    tracing_subscriber::registry().with(lines.with_filter(filter)).with(spans).init();
    Ok(())
}
