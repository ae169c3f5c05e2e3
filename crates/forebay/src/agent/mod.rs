//! `forebay agent`: moves checkpoints between tiers until it is told to end. What it does is in `forebay-agent`; here
//! are its configuration, also anew after SIGHUP, its log and its end.

mod log;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_agent::trace::Exporter;
use forebay_agent::{Counts, Service, notify};
use forebay_error::{Code, Error, Result};
use forebay_tier::config::{Beside, Config};

use crate::args::Global;
use crate::console::Console;
use crate::interrupt;

/// How long transfers may take to end after a signal; a part takes less than a second on anything that works.
const GRACE: Duration = Duration::from_secs(15);

/// `forebay agent`
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    #[command(flatten)]
    configured: Configured,
    /// Read configuration, tokens and certificates, say what is wrong with them, and start nothing
    #[arg(long)]
    check: bool,
    /// How the log is written to stderr
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// Where a configuration is.
#[derive(Debug, Args)]
pub(crate) struct Configured {
    /// The configuration [default: FOREBAY_CONFIG, ./forebay.toml, ~/.config/forebay/forebay.toml,
    /// /etc/forebay/forebay.toml]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A value that counts instead of the file's, as in `tiers.look_every=1s`. May be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Configured {
    /// Reads it. Errors: those of [`Config::load`].
    pub(crate) fn load(&self) -> Result<Config> {
        let beside = Beside::of_process(self.set.iter().map(String::as_str))?;
        Config::load(self.config.as_deref(), &beside)
    }
}

/// How the log is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// A line for people.
    Text,
    /// An object a line.
    Json,
}

/// Runs until a signal.
pub(crate) fn run(args: &AgentArgs, global: &Global, console: &Console) -> Result<()> {
    let config = args.configured.load()?;
    if args.check {
        log::start(global.verbose, args.log_format == LogFormat::Json, None)?;
        forebay_agent::check(&config)?;
        let file =
            config.file.as_deref().map_or("no file".into(), |file| file.display().to_string());
        console.note(&format!("{file}: {} tiers, fit for an agent", config.tiers.len()));
        return Ok(());
    }
    let counts = Arc::new(Counts::default());
    let traces = config.agent.otlp_endpoint.as_deref();
    let traces = traces.map(|endpoint| Exporter::start(endpoint, Arc::clone(&counts)));
    let (exporter, layer) = traces.transpose()?.unzip();
    log::start(global.verbose, args.log_format == LogFormat::Json, layer)?;
    interrupt::grace(GRACE);
    // On a terminal it is the end of that, and of what runs there.
    if !std::io::stdin().is_terminal() {
        interrupt::reloads();
    }
    let mut service = Service::start(&config, counts)?;
    started(&service, &config, console);
    while interrupt::received().is_none() {
        if interrupt::take_reload() {
            service = reloaded(service, args, console)?;
        }
        interrupt::wait(Duration::from_secs(3600));
    }
    notify("STOPPING=1");
    tracing::info!("ending");
    service.stop();
    // After the last span.
    drop(exporter);
    Ok(())
}

fn started(service: &Service, config: &Config, console: &Console) {
    if let Some(address) = service.http() {
        // For whoever has asked for port 0.
        console.note(&format!("listening on {address}"));
    }
    notify(&format!("READY=1\nSTATUS=moving between {} tiers", config.tiers.len()));
    tracing::info!(tiers = config.tiers.len(), "started");
}

/// Reads the configuration anew, and goes on with it if it is fit; else as before. Errors: it does not even start as it
/// did before.
fn reloaded(service: Service, args: &AgentArgs, console: &Console) -> Result<Service> {
    notify("RELOADING=1");
    let (service, done, config) = match args.configured.load() {
        Err(error) => (Some(service), Err(error), None),
        Ok(config) => {
            let (service, done) = service.restart(&config);
            (service, done, Some(config))
        }
    };
    match (service, done, config) {
        (Some(service), Ok(()), Some(config)) => {
            started(&service, &config, console);
            Ok(service)
        }
        (Some(service), Err(error), _) => {
            let error = error.render();
            tracing::error!(error, "the configuration is not taken: it goes on as it was");
            notify("READY=1\nSTATUS=the configuration has a mistake: see the log");
            Ok(service)
        }
        (_, done, _) => {
            let ended = || Error::new(Code::Internal, "the agent did not start again");
            Err(done.err().unwrap_or_else(ended))
        }
    }
}
