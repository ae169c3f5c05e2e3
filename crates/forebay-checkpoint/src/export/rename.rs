//! Rules that give tensors other names: `OLD=NEW`.
//!
//! Without a `*`, OLD is a whole name, or with a dot at its end the start of names. A `*` in OLD stands for any text,
//! as short as the rest allows; the stars of NEW take those texts in their order, and NEW may have fewer. The first
//! rule that fits a name counts.
//!
//! ```text
//! model.=                           model.embed.weight    -> embed.weight
//! lm_head.weight=head.weight        that name alone
//! layers.*.attn.*=h.*.attention.*   layers.7.attn.q       -> h.7.attention.q
//! ```

use std::fmt;
use std::str::FromStr;

/// The most stars of a rule.
const MAX_STARS: usize = 16;

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rename {
    old: Vec<String>,
    new: Vec<String>,
    /// OLD is the start of names.
    is_prefix: bool,
}

impl FromStr for Rename {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (old, new) = text.split_once('=').ok_or("not of the form OLD=NEW")?;
        if old.is_empty() {
            return Err("OLD is empty".to_owned());
        }
        let parts = |text: &str| text.split('*').map(str::to_owned).collect::<Vec<_>>();
        let rule = Self { old: parts(old), new: parts(new), is_prefix: false };
        let is_prefix = rule.old.len() == 1 && old.ends_with('.');
        if rule.old.len() > MAX_STARS + 1 {
            return Err(format!("more than {MAX_STARS} stars"));
        }
        match rule.new.len() > rule.old.len() {
            true => Err("NEW has more stars than OLD".to_owned()),
            false => Ok(Self { is_prefix, ..rule }),
        }
    }
}

impl fmt::Display for Rename {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.old.join("*"), self.new.join("*"))
    }
}

impl Rename {
    /// The new name; `None` where the rule does not fit.
    pub fn apply(&self, name: &str) -> Option<String> {
        if self.is_prefix {
            let rest = name.strip_prefix(self.old.first()?)?;
            return Some(format!("{}{rest}", self.new.first()?));
        }
        let texts = self.texts(name)?;
        let mut renamed = self.new.first()?.clone();
        for (text, part) in texts.iter().zip(self.new.iter().skip(1)) {
            renamed.push_str(text);
            renamed.push_str(part);
        }
        Some(renamed)
    }

    /// What the stars stand for.
    fn texts<'n>(&self, name: &'n str) -> Option<Vec<&'n str>> {
        let (first, parts) = self.old.split_first()?;
        let mut rest = name.strip_prefix(first.as_str())?;
        let Some((last, middle)) = parts.split_last() else {
            return rest.is_empty().then(Vec::new);
        };
        let mut texts = Vec::with_capacity(parts.len());
        for part in middle {
            // The first place: whatever follows has the most room then.
            let (text, behind) = rest.split_once(part.as_str())?;
            texts.push(text);
            rest = behind;
        }
        texts.push(rest.strip_suffix(last.as_str())?);
        Some(texts)
    }
}

/// The name that the first fitting rule gives, or the name itself.
pub(super) fn rename(rules: &[Rename], name: &str) -> String {
    rules.iter().find_map(|rule| rule.apply(name)).unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_fits_counts() {
        let rules: Vec<Rename> = [
            "model.embed=emb",
            "layers.*.attn.*=h.*.attention.*",
            "*.running_mean=*.mean",
            "drop.*.x=kept",
            "model.=",
            "a*b=",
        ]
        .map(|rule| rule.parse().unwrap())
        .into();
        for (name, wanted) in [
            ("model.embed", "emb"),
            ("model.embed.weight", "embed.weight"),
            ("layers.7.attn.q.w", "h.7.attention.q.w"),
            ("layers.attn.q", "layers.attn.q"),
            ("bn.running_mean", "bn.mean"),
            ("drop.1.x", "kept"),
            ("modelx", "modelx"),
            ("aXb", ""),
            ("ab", ""),
            ("other", "other"),
        ] {
            assert_eq!(rename(&rules, name), wanted, "{name}");
        }
        for bad in ["", "x", "=x", "a=*", "a*=**", &format!("{}=", "*".repeat(17))] {
            assert!(bad.parse::<Rename>().is_err(), "{bad}");
        }
    }
}
