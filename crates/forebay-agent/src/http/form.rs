//! Forms: pairs of names and values as browsers send them, and what those of the page may ask for.

use serde_json::{Map, Value, json};

/// Most fields of a form.
const FIELDS_MAX: usize = 32;

/// The fields of `application/x-www-form-urlencoded`; `None` for what is none.
pub(super) fn fields(text: &str) -> Option<Vec<(String, String)>> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    let mut fields = Vec::new();
    for pair in pairs {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        fields.push((decoded(name)?, decoded(value)?));
        if fields.len() > FIELDS_MAX {
            return None;
        }
    }
    Some(fields)
}

/// The first field of a name.
pub(super) fn field<'f>(fields: &'f [(String, String)], name: &str) -> Option<&'f str> {
    fields.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                let (high, low) = (digit(rest.next())?, digit(rest.next())?);
                u8::try_from(high * 16 + low).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// The action that a form of the page asks for; `None` for others. Removing takes the box that says so.
pub(super) fn action(fields: &[(String, String)]) -> Option<Value> {
    let text = |name: &'static str| field(fields, name).map(|value| json!(value));
    let number = |name: &'static str| field(fields, name)?.parse::<u64>().ok().map(|n| json!(n));
    let action = field(fields, "action")?;
    let mut value = Map::from_iter([("action".to_owned(), json!(action))]);
    let needs = match action {
        "wake" => Vec::new(),
        "pause" | "resume" => vec![("tier", text("tier")?)],
        "pin" => vec![("step", number("step")?), ("name", text("name")?)],
        "unpin" => vec![("name", text("name")?)],
        "hold" | "release" => vec![("step", number("step")?)],
        "prune" => vec![("dry_run", json!(field(fields, "really") != Some("yes")))],
        _ => return None,
    };
    value.extend(needs.into_iter().map(|(name, found)| (name.to_owned(), found)));
    Some(Value::Object(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_decoded_and_bounded() {
        let found = fields("a=b+c&d=%3Cx%26%C3%A9&e&=f").unwrap();
        assert_eq!(field(&found, "a"), Some("b c"));
        assert_eq!(field(&found, "d"), Some("<x&é"));
        assert_eq!(field(&found, "e"), Some(""));
        assert_eq!(field(&found, "none"), None);
        for bad in ["a=%", "a=%4", "a=%zz", "a=%ff", &"x&".repeat(40)] {
            assert_eq!(fields(bad), None, "{bad}");
        }
    }

    #[test]
    fn forms_ask_for_what_the_page_has() {
        let ask = |text| action(&fields(text).unwrap());
        assert_eq!(ask("action=pause&tier=nvme"), Some(json!({"action": "pause", "tier": "nvme"})));
        let pin = json!({"action": "pin", "step": 7, "name": "best"});
        assert_eq!(ask("action=pin&step=7&name=best&x=y"), Some(pin));
        assert_eq!(ask("action=prune"), Some(json!({"action": "prune", "dry_run": true})));
        let really = json!({"action": "prune", "dry_run": false});
        assert_eq!(ask("action=prune&really=yes"), Some(really));
        for none in ["", "action=promote&step=1", "action=pin&step=x&name=y", "action=hold"] {
            assert_eq!(ask(none), None, "{none}");
        }
    }
}
