//! Tiers in a training process: the runner of `forebay-tier`, its threads in this process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_checkpoint::commit::Other;
use forebay_error::{Code, Error};
use forebay_tier::config::{Beside, Config, TierConfig};
use forebay_tier::nearest::{Look, Passed, Source, Unlanded, Wanted, choose, ranks_here, unlanded};
use forebay_tier::policy::Backlog;
use forebay_tier::runner::{Action, Admitted, Duties, Reach, Runner, Tiers as Opened};
use pyo3::prelude::*;

use super::usage;
use crate::error::Result;
use crate::fork::Own;
use crate::place::remember_settings;
use crate::wait::interruptible;

/// How often a wait looks whether it was interrupted.
const TICK: Duration = Duration::from_millis(100);

/// See the module.
#[pyclass(frozen, module = "forebay._native")]
pub(crate) struct Tiers {
    inner: Own<Arc<Runner>>,
}

#[pymethods]
impl Tiers {
    /// From a file, or the text of one. Without `moves` it only looks: an agent does the rest. `reach`: "all", or
    /// "drive" and "beyond" where the first tier is on the drives of nodes.
    #[new]
    #[pyo3(signature = (file, text=None, moves=true, reach="all"))]
    fn new(
        py: Python<'_>,
        file: PathBuf,
        text: Option<String>,
        moves: bool,
        reach: &str,
    ) -> Result<Self> {
        let duties = if moves { Duties::All } else { Duties::Look };
        let reach = match reach {
            "all" => Reach::All,
            "drive" => Reach::OwnDrive,
            "beyond" => Reach::Beyond,
            _ => return Err(usage("no such reach").into()),
        };
        let runner = interruptible(py, move |_| {
            let tiers = Opened::open(&configured(&file, text.as_deref())?)?;
            Runner::start_for(tiers, duties, reach)
        })?;
        Ok(Self { inner: Own::new(Arc::new(runner), "these tiers") })
    }

    /// Reads a file, or the text of one, so that its buckets are reached as it says; opens nothing. The places of the
    /// tiers, the nearest first, and what a save does for which the first has no room.
    #[staticmethod]
    #[pyo3(signature = (file, text=None))]
    fn read(file: PathBuf, text: Option<String>) -> Result<(Vec<String>, &'static str)> {
        let config = configured(&file, text.as_deref())?;
        let backlog = match config.moving.backlog {
            Backlog::Wait => "wait",
            Backlog::Skip => "skip",
            Backlog::Straight => "straight",
        };
        Ok((config.tiers.iter().map(TierConfig::url).collect(), backlog))
    }

    /// The socket of the agent, as the configuration that counts says.
    #[staticmethod]
    fn agent_socket() -> Result<PathBuf> {
        Ok(Config::load(None, &Beside::of_process([])?)?.agent.socket)
    }

    /// Something was saved: look now.
    fn wake(&self, py: Python<'_>) -> Result<()> {
        let runner = self.inner.get()?;
        py.detach(|| runner.wake());
        Ok(())
    }

    /// Waits until a save as large as the newest step has room on the first tier; False where it is to be left out.
    fn admit(&self, py: Python<'_>, patience_s: f64) -> Result<bool> {
        let runner = Arc::clone(self.inner.get()?);
        let until = Instant::now() + Duration::try_from_secs_f64(patience_s).unwrap_or(TICK);
        interruptible(py, move |stop| {
            loop {
                match runner.admit_next(TICK) {
                    Ok(Admitted::Skip) => return Ok(false),
                    Ok(Admitted::Save(_)) => return Ok(true),
                    Err(error) if error.code() == Code::Timeout => {
                        if stop.is_set() || Instant::now() >= until {
                            return Err(error);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }

    /// From where to restore a step, or the newest: `(place, step, whether it is older than the newest, what was passed
    /// over and why)`.
    #[staticmethod]
    #[pyo3(signature = (file, text=None, step=None))]
    fn nearest(
        py: Python<'_>,
        file: PathBuf,
        text: Option<String>,
        step: Option<u64>,
    ) -> Result<(String, u64, bool, Vec<String>)> {
        interruptible(py, move |_| {
            nearest(&*Opened::open(&configured(&file, text.as_deref())?)?, step)
        })
    }

    /// A step, or the newest, if it is on the drives of nodes only: its number, bytes of it that the next tier lacks,
    /// and the ranks whose data are among these.
    #[staticmethod]
    #[pyo3(signature = (file, text=None, step=None))]
    fn unlanded(
        py: Python<'_>,
        file: PathBuf,
        text: Option<String>,
        step: Option<u64>,
    ) -> Result<Option<(u64, u64, Vec<u32>)>> {
        interruptible(py, move |_| {
            let tiers = Opened::open(&configured(&file, text.as_deref())?)?;
            let roots = (0..tiers.count()).filter_map(|tier| tiers.root(tier).ok());
            let wanted = step.map_or(Wanted::Latest, Wanted::Step);
            let found = unlanded(&roots.collect::<Vec<_>>(), wanted)?;
            let told = |found: Unlanded| {
                (found.step, found.lacking, found.ranks.into_iter().collect::<Vec<u32>>())
            };
            Ok(found.map(told))
        })
    }

    /// The ranks whose data of a step are on this node's drive.
    #[staticmethod]
    fn ranks_here(
        py: Python<'_>,
        file: PathBuf,
        text: Option<String>,
        step: u64,
    ) -> Result<Vec<u32>> {
        interruptible(py, move |_| {
            let tiers = Opened::open(&configured(&file, text.as_deref())?)?;
            Ok(ranks_here(&tiers.root(0)?, step)?.into_iter().collect())
        })
    }

    /// How everything stands, as JSON.
    fn status(&self, py: Python<'_>) -> Result<String> {
        let runner = self.inner.get()?;
        let status = py.detach(|| runner.status());
        Ok(json(&status)?)
    }

    /// Does what an action in JSON says; its outcome in JSON.
    fn act(&self, py: Python<'_>, action: &str, who: String) -> Result<String> {
        let action: Action = serde_json::from_str(action)
            .map_err(|error| usage("no such action").with_source(error))?;
        let runner = Arc::clone(self.inner.get()?);
        interruptible(py, move |_| json(&runner.act(&action, &who)?))
    }

    /// Waits until every step is where it should be; whether it is. Copies that cannot be removed are not waited for.
    fn drain(&self, py: Python<'_>, timeout_s: f64) -> Result<bool> {
        let runner = Arc::clone(self.inner.get()?);
        let until = Duration::try_from_secs_f64(timeout_s).ok().map(|time| Instant::now() + time);
        interruptible(py, move |stop| {
            loop {
                if runner.look(TICK * 5) {
                    let pending = runner.pending();
                    if pending.is_over() {
                        return Ok(pending.is_none());
                    }
                }
                if stop.is_set() || until.is_some_and(|until| Instant::now() >= until) {
                    return Ok(false);
                }
                std::thread::sleep(TICK / 4);
            }
        })
    }

    /// Ends what is under way within one part.
    fn stop(&self, py: Python<'_>) -> Result<()> {
        let runner = Arc::clone(self.inner.get()?);
        py.detach(|| runner.stop());
        Ok(())
    }
}

impl Tiers {
    /// All tiers but the first, to be opened.
    pub(super) fn farther(&self) -> Result<Vec<Other>> {
        let tiers = self.inner.get()?.tiers();
        let open = |tier: usize| {
            let tiers = Arc::clone(tiers);
            Box::new(move || tiers.found(tier)) as Other
        };
        Ok((1..tiers.count()).map(open).collect())
    }
}

fn configured(file: &Path, text: Option<&str>) -> forebay_error::Result<Config> {
    let beside = Beside::of_process([])?;
    let config = match text {
        Some(text) => Config::from_text(text, file, &beside)?,
        None => Config::load(Some(file), &beside)?,
    };
    for tier in &config.tiers {
        remember_settings(&tier.url(), &tier.store);
    }
    Ok(config)
}

fn json(value: &impl serde::Serialize) -> forebay_error::Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::new(Code::Internal, "cannot write JSON").with_source(error))
}

fn nearest(
    tiers: &Opened,
    step: Option<u64>,
) -> forebay_error::Result<(String, u64, bool, Vec<String>)> {
    let place =
        |tier: usize| tiers.config().tiers.get(tier).map(TierConfig::url).unwrap_or_default();
    let (mut roots, mut numbers, mut passed) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = None;
    for tier in 0..tiers.count() {
        match tiers.found(tier) {
            Ok(None) => {}
            Ok(Some(root)) => {
                roots.push(root);
                numbers.push(tier);
            }
            Err(error) => {
                passed.push(format!("{}: {error}", place(tier)));
                first.get_or_insert(error);
            }
        }
    }
    if let Some(error) = first.filter(|_| roots.is_empty()) {
        return Err(error);
    }
    let wanted = step.map_or(Wanted::Latest, Wanted::Step);
    let Source { tier, step, older_than_wanted, passed: over, .. } =
        choose(&roots, wanted, Look::Listing)?;
    let number = |tier: usize| numbers.get(tier).copied().unwrap_or_default();
    let line = |passed: &Passed| format!("{}: {}", place(number(passed.tier)), passed.error);
    passed.extend(over.iter().map(line));
    Ok((place(number(tier)), step, older_than_wanted, passed))
}
