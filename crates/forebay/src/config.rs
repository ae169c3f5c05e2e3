//! `forebay config`: every value of the configuration, and where it came from.
//!
//! JSON: `{"file", "settings": [{"key", "value", "from": {"kind", ...}}]}`; sizes in bytes, rates in bytes a second,
//! times in seconds.

use forebay_error::Result;
use forebay_tier::config::{Config, Provenance, Setting};
use serde::Serialize;
use serde_json::Value;

use crate::ckpt::{Outcome, table};
use crate::console::{Console, clean};
use crate::tier::ConfigArgs;

#[derive(Serialize)]
struct Report<'a> {
    file: Option<String>,
    settings: &'a [Setting],
}

/// Runs it.
pub(crate) fn run(args: &ConfigArgs, console: &Console) -> Result<Outcome> {
    let config = args.load()?;
    let file = config.file.as_ref().map(|file| file.display().to_string());
    if console.is_json() {
        console.json(&Report { file, settings: &config.settings })?;
        return Ok(Outcome::Good);
    }
    if file.is_none() {
        console.note("no forebay.toml was found: these are the defaults");
    }
    console.print(|out| {
        use table::Side::Left;
        let head = [("KEY", Left), ("VALUE", Left), ("FROM", Left)];
        table::write(out, head, &rows(&config))
    })?;
    console.note("defaults of [tier.store] are left out; --json has them");
    Ok(Outcome::Good)
}

fn rows(config: &Config) -> Vec<[String; 3]> {
    let shown = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => clean(text).into_owned(),
        other => other.to_string(),
    };
    let row = |setting: &Setting| {
        let from = clean(&setting.from.to_string()).into_owned();
        [clean(&setting.key).into_owned(), shown(&setting.value), from]
    };
    config.settings.iter().filter(|setting| !is_usual(setting)).map(row).collect()
}

/// What nobody has said about how a bucket is reached: seventeen lines for each tier.
fn is_usual(setting: &Setting) -> bool {
    setting.key.contains(".store.") && setting.from == Provenance::Default
}
