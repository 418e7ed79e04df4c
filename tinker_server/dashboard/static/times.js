// Times of plots as ISO 8601 has them, in the viewer's zone.

const DAY_S = 86400, DATE = "{YYYY}-{MM}-{DD}", _ = null, BELOW = 1;

// Rows of uPlot: the least step in seconds, its format, and what stands below it at a new year, month, day, hour, minute, second.
export const AXIS = [
  [365 * DAY_S, "{YYYY}", _, _, _, _, _, _, BELOW],
  [28 * DAY_S, "{YYYY}-{MM}", _, _, _, _, _, _, BELOW],
  [DAY_S, "{MM}-{DD}", "\n{YYYY}", _, _, _, _, _, BELOW],
  [60, "{HH}:{mm}", `\n${DATE}`, _, `\n${DATE}`, _, _, _, BELOW],
  [1, "{HH}:{mm}:{ss}", `\n${DATE}`, _, `\n${DATE}`, _, _, _, BELOW],
  [0.001, "{HH}:{mm}:{ss}.{fff}", `\n${DATE}`, _, `\n${DATE}`, _, _, _, BELOW],
];

const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;
export const TIME = { label: `Time (${ZONE})`, value: `${DATE} {HH}:{mm}:{ss}` };
